"""The common parts of all benchmarks: command frame, rows, tables, timing, texts, plots."""
