"""How local selections are: on real text, in recorded traces, and generated as published."""
