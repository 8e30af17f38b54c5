"""The cost of a handoff: bytes per second, time after the prompt, misses; and its gain."""
