"""Optimizers: AdamW and LAMB over ZeRO shards, gradient clipping, learning rate schedules."""
