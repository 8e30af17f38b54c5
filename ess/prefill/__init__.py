"""Prompts through a pipeline of stages: the lead decides, every stage obeys in the same order."""
