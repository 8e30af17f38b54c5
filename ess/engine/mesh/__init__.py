"""Engines of the parts of one model, which make the same calls in the same order."""
