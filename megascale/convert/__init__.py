"""Conversion of weights and checkpoints from and to other systems."""
