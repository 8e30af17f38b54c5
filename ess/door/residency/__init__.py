"""Which rows are in slots, and which come next."""
