"""A server's devices: what is there, and what it will take of each."""
