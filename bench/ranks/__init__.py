"""Ranks that divide the experts: what they send one another, and what hides it."""
