"""Benchmarks: GEMM throughput, links, training steps, overlap, and hardware profiles for the planner."""
