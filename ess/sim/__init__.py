"""Predictions with the same deciders that serve: workloads, policies, pipelines, steps."""
