"""Published results beside the simulator's."""
