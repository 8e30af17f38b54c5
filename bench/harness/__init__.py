"""What every benchmark uses: the frame of a command, rows, tables, timing, texts, plots."""
