"""Causes of a slow run, by its event store; no torch needed."""
