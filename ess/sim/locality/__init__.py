"""Which rows are selected, and which of them miss."""
