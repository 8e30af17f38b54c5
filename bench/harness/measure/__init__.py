"""How times are taken: of steps, of a slowed link, of streams from a server; on which machine."""
