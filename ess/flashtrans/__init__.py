"""FlashTrans moves: many small rows in one call, and the lanes they travel on."""
