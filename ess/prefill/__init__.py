"""Prompts through a pipeline of stages: the lead decides, all stages obey in the same order."""
