"""Our kernels for NVIDIA devices, through cuda-python; importing this package needs neither."""
