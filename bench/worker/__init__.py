"""A slice of one GPU of a worker that decodes a large model, at its true dimensions."""
