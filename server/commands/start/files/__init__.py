"""What is read from files before a server starts: checkpoint, texts, secrets, the cache of a hub."""
