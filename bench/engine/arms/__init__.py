"""What benchmarks of the engine decode with: an engine in one way, and placements around it."""
