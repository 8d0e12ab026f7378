"""Fault tolerance: the agent of a node, the driver of a job, incidents, policy, diagnosis and injection. No torch."""
