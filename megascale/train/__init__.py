"""The step, the loop around it, and how a run is put together from its configuration."""
