"""A pipeline that is timed: the stages and the lead of a worker, without a server."""
