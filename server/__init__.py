"""The server speaks HTTP."""
