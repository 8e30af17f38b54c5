"""Published results beside ours, and the laboratory of eviction policies."""
