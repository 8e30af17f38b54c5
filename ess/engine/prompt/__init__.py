"""Prompt chunks: from tokens to rows, keys, windows and the chances of tokens."""
