"""Where the server listens, and how the first process accepts for another that is missing."""
