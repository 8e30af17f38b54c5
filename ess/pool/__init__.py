"""Pools decide: who lives where, who gives way, what is reserved. No torch in here."""
