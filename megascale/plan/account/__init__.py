"""Parameters, FLOPs, communication and memory of a run, from one description of the model's blocks."""
