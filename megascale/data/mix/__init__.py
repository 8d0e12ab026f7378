"""The samples of a run: epochs of datasets, blended, packed, and loaded as micro-batches."""
