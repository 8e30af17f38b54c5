"""What a handoff costs: bytes per second, time after the prompt, misses, and what it buys."""
