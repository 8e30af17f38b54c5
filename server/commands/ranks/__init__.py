"""`ess serve --dp-size N`: servers that divide the experts, started and kept together."""
