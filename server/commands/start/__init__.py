"""From settings to a server that listens."""
