"""The `megascale` command: one module per subcommand, imported only when the subcommand runs."""
