"""The embedded model: a small DeepSeek-V3.2 of true row size, and everything that made it."""
