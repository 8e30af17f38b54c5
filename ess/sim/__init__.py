"""Predictions of a decode worker: measured operators, the real deciders, lanes on a timeline."""
