"""What the user asked for: typed sections, read from TOML and checked before anything starts. No torch here."""
