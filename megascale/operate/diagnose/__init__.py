"""Readers of what ranks recorded: why a job hangs, why it is slow."""
