"""Everything that a configuration can choose by name, described without torch."""
