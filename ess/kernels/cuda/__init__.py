"""Kernels of ours for NVIDIA devices, through cuda-python; importing this package needs neither."""
