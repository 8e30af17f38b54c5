"""The engine owns the step: plan, run, commit. Imports nothing heavy by itself."""
