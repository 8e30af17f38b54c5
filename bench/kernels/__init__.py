"""Benchmarks of the native kernels and the residency planner."""
