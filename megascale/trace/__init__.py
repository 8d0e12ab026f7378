"""Writing down what happens in a run."""
