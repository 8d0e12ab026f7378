"""Code that every layer shares: errors, events, files, registries, units and this process's rank. Standard library."""
