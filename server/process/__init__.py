"""The life of the server process and its link to the engine process."""
