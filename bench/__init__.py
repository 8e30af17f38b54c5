"""Benchmarks that print a ratio against a named baseline."""
