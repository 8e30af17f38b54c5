"""Pages on disk: the prefix cache's third tier."""
