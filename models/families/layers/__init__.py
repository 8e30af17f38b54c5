"""Layers of families that compute something else than the shared decoder layer."""
