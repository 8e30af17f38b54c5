"""Which rank has which experts of a layer: placements, how they come from loads, how loads are
counted."""
