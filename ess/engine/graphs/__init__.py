"""Decode steps as graphs of a device: captured once for their kind, then replayed."""
