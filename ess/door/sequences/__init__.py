"""A request's rows: what they hold, how far they have come, where they come from."""
