"""The layout of a run: ranks, pipeline stages, named tensors and their sharding. Integer arithmetic, without torch."""
