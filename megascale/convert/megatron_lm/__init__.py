"""Checkpoints of Megatron-LM, read and written."""
