"""A run's records: the event log of every rank, and metrics."""
