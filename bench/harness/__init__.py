"""What every benchmark uses: rows of a report, timing, the machine, texts, plots."""
