"""Kernels compute: attention partials, codecs, merge. Imports nothing heavy by itself."""
