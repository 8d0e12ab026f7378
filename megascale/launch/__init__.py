"""From a configuration to running processes. No torch here: the launcher must survive what its ranks do not."""
