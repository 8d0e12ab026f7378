"""The data pipeline: from text files to the batches of a training step."""
