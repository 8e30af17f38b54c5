"""`ess plan` and `ess sim`: what fits a node, what it predicts, and pages of both."""
