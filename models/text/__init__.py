"""Text to ids and back, as it streams."""
