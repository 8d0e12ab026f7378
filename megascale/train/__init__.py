"""Training: the step, the loop, and the construction of a run from a configuration."""
