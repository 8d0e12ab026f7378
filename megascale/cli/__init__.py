"""The `megascale` command: one file a subcommand, imported only when it runs."""
