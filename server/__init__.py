"""The HTTP server and the `ess` command."""
