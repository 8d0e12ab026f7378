"""Hybrid data parallelism: which ranks of the dp x cp pool train on which sequences of a step. No torch."""
