"""Residency of one layer group: the specification, the native planner and the CUDA one."""
