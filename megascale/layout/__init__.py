"""Who holds what: rank arithmetic, stages, named tensors and how they are cut. Integers only."""
