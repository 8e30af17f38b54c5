"""How a config.json is read: keys, rope, linear attention, and the checks. Needs no torch."""
