"""Ranks that divide the experts: what they send to each other, and what hides it."""
