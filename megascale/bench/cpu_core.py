"""Timings of GEMMs and attention on one CPU core, by shape and dtype, in seconds of processor time.

Processor time excludes other processes, apart from their use of caches and memory bandwidth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megascale.bench.cost_fit import Measurement

GEMM_SHAPES = (
    (32, 32, 32), (64, 64, 64), (128, 128, 128), (64, 512, 512), (256, 256, 256), (512, 128, 512), (512, 512, 128),
    (512, 512, 1536), (512, 320, 4096), (768, 768, 768), (1024, 1024, 1024), (1024, 512, 2048),
)  # fmt: skip
"""(m, k, n) of x [m, k] times weight [n, k]."""

ATTENTION_SHAPES = (
    (8, 128, 64), (4, 256, 32), (4, 256, 64), (4, 256, 128), (4, 512, 64), (2, 1024, 32), (2, 1024, 64), (2, 1024, 128),
)  # fmt: skip
"""(heads, keys, head_dim)."""

ROUNDS = 5

TIMING_S = 2e-3


def time_calls(work: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, ...]:
    """Time `work` in seconds of this process's processor time, `rounds` times after a warm-up."""
    work()
    start = time.process_time()
    work()
    once = time.process_time() - start
    group = max(1, math.ceil(TIMING_S / max(once, 1e-7)))
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(group):
            work()
        seconds.append((time.process_time() - start) / group)
    return tuple(seconds)


def measure_gemms(dtype: torch.dtype) -> list[Measurement]:
    """Time the three GEMMs of a linear layer for every shape. Amounts: calls, FLOPs, bytes.

    forward  y  = x W^T         [m, k] x [k, n]
    dgrad    dx = dy W          [m, n] x [n, k]
    wgrad    main_grad += dy^T x  [n, m] x [m, k]
    """
    return [_measure_gemm(m, k, n, dtype) for m, k, n in GEMM_SHAPES]


def _measure_gemm(m: int, k: int, n: int, dtype: torch.dtype) -> Measurement:
    x, weight, grad = (torch.randn(*shape).to(dtype) for shape in ((m, k), (n, k), (m, n)))
    main_grad = torch.zeros(n, k, dtype=dtype)

    def three_gemms() -> None:
        torch.mm(x, weight.t())
        torch.mm(grad, weight)
        main_grad.addmm_(grad.t(), x)

    moved = x.nbytes + weight.nbytes + grad.nbytes
    return Measurement((3, 3 * 2 * m * k * n, 3 * moved), time_calls(three_gemms))


def measure_attention(dtype: torch.dtype, *, backward: bool) -> list[Measurement]:
    """Time causal attention for every shape. Amounts: FLOPs under the mask, with one key per query, with head_dim 1."""
    return [_measure_attention(*size, dtype, backward) for size in ATTENTION_SHAPES]


def _measure_attention(heads: int, keys: int, width: int, dtype: torch.dtype, backward: bool) -> Measurement:
    # random leaves [1, heads, keys, head_dim], in memory [keys, heads, head_dim] as in a layer
    drawn = (torch.randn(keys, 1, heads, width).to(dtype).permute(1, 2, 0, 3) for _ in range(3))
    q, k, v = (tensor.requires_grad_() for tensor in drawn)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad = torch.randn(heads * keys * width).to(dtype).view_as(out)
    one_key_flops = 2 * 2 * heads * keys * width * (2.5 if backward else 1)  # backward recomputes the scores

    def forward_pass() -> None:
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward_pass() -> None:
        torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    amounts = one_key_flops * keys / 2, one_key_flops, one_key_flops * keys / 2 / width
    return Measurement(amounts, time_calls(backward_pass if backward else forward_pass))
