"""Prompts through a pipeline of stages: real processes, and the same times on a virtual clock."""
