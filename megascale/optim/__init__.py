"""The update of the weights."""
