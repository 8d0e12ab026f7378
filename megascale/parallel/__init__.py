"""Parallelism: tensor-parallel and FP8 layers, gradient buckets with ZeRO sharding, and the pipeline executor."""
