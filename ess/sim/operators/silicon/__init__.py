"""Operators of one GPU as measured, and the costs around them, each argued by itself."""
