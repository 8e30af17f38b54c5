"""How a guest's indexer is trained. Not in the wheel."""
