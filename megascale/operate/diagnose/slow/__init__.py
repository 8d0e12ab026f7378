"""Causes of a slow run, from its event store: causes, costs, heat map, breakdown of MFU."""
