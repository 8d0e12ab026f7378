"""Parameters, FLOPs, traffic and memory of a run, from one description of its blocks."""
