"""What an engine's process checks about its machine and its device before it serves."""
