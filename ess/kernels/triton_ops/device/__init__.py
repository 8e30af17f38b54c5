"""What runs on the device, in the language of Triton, which type checkers cannot read."""
