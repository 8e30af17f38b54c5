"""Kernels of other libraries, where they are installed and pass a probe."""
