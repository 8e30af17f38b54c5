"""Models that attend to entries, each made of several tokens, beside the last tokens (V4)."""
