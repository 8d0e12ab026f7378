"""What a run costs: parameters, FLOPs, bytes. Formulas over the configuration, no torch."""
