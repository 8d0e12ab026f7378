"""In-memory checkpoints: copies of the state in host memory, replicated to a second host if asked."""
