"""What a run is made of, from one description of its blocks: parameters, FLOPs, traffic and memory."""
