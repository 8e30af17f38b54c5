"""Prefill in a pipeline of chunks."""
