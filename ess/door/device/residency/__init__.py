"""Rows that move between steps: what lands, leaves, comes back, and what the host knows of it."""
