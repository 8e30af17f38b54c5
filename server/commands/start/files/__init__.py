"""What is read from files before a server starts: checkpoint, texts, secrets, a hub's cache."""
