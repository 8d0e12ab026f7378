"""Optimizers: update rules over ZeRO shards and whole matrices, gradient clipping, learning rate schedules."""
