"""Published results beside what the simulator says."""
