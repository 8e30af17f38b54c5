"""What an engine's process finds out about its machine and its device before it serves."""
