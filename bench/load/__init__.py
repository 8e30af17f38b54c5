"""`ess-bench load`: a running server under arriving requests, as its users see it."""
