"""Slots, index pages and tables on a CUDA device; rows in page-locked memory of the host."""
