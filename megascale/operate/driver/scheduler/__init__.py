"""The scheduler port, and its adapters: what gives nodes to a job, and takes them back."""
