"""One step on a device: its slots, what its calls answer, its end."""
