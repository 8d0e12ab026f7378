"""Code that every layer shares: errors, processes, files, registries, units and this process's rank. Standard library."""
