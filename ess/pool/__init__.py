"""Pools: where rows live, which row gives way, what is reserved. No torch in here."""
