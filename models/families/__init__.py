"""One short file per family: what of a configuration it reads, and what its layers do."""
