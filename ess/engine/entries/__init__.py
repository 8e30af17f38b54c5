"""Models that attend to entries of several tokens, through the engine."""
