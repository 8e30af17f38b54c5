"""Which rank has which experts of a layer: placements, balancing, counted loads."""
