"""Registries of everything a configuration chooses by name, described without torch."""
