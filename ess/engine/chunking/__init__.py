"""How prompts are cut: what layers each stage has, and how long each chunk is. Needs no torch."""
