"""Code that every layer shares: errors, processes, files, registries, units and the rank. Standard library."""
