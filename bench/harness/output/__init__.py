"""How results are shown: rows as text, plots, timelines for trace viewers."""
