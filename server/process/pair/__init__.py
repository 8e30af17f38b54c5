"""The other workers of a split into prefill and decode: their addresses, and connecting to them."""
