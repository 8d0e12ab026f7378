"""Configurations: typed sections, read from TOML and checked before any process starts. No torch here."""
