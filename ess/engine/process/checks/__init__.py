"""Checks of the machine and its devices by the engine's own code."""
