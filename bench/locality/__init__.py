"""How local selections are: of real text, of recorded traces, and generated as published."""
