"""The step of a serving process: what to run next, and what to keep of it."""
