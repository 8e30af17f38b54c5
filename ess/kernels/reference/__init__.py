"""The ops in plain torch and the formats in NumPy: slow, obvious, what the others are held to."""
