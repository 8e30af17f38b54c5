"""Arriving requests, and what their users see."""
