"""Benchmarks: GEMM throughput, links, training steps, and hardware profiles for the planner."""
