"""Hugging Face checkpoints, read as untrusted input: headers, shapes, slices, tensors."""
