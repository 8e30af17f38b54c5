"""The engine's own process and its end of the wire."""
