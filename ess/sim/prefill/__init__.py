"""Chunked prefill in a pipeline."""
