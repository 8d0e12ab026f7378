"""Search over layouts of a model on a cluster: legal layouts, bounds, the fastest ones, and reports of plans."""
