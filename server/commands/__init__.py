"""The `ess` command: one module per subcommand."""
