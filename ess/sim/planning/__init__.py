"""What to run on which hardware, what it gives over all GPUs, and what it costs."""
