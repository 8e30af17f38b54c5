"""The server's listeners, and how the first process accepts for one that is missing."""
