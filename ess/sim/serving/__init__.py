"""Requests that arrive, and what their users see."""
