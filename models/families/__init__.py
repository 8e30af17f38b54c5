"""A short file for each family: which keys of a configuration it reads, and what its layers do."""
