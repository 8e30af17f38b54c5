"""The engines of a server: one after another, each of one process or several."""
