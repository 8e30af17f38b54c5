"""The routes beside the dialects: status, texts, traces, peers and pauses."""
