"""Which rows are in slots beside the steps: what lands, leaves, comes back, and what is sure."""
