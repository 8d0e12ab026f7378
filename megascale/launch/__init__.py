"""Launching: from a configuration to running processes. Without torch: the launcher must outlive failing ranks."""
