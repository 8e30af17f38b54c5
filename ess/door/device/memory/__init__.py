"""What lies on a device, and what the host knows of it: slots, keys, maps, counters, the lane."""
