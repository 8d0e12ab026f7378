"""Readers of a run's event log: timeline, summary and picture. Never imported by training."""
