"""Dry runs: the training program as any rank of any job, in one process, on fake tensors and fake process groups."""
