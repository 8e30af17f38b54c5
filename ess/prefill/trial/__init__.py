"""A timed pipeline: the stages and the lead of a worker, without a server."""
