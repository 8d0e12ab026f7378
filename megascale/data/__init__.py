"""Tokens in: from text to the batches of a step."""
