"""Benchmarks of the engine and the server on this machine, with the embedded model."""
