"""What to run on which hardware, the gain over all GPUs, and the cost."""
