"""Predictions of a decode worker: measured operators, the product's own policies, timelines."""
