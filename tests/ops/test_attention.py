"""Causal attention against its formula, query by query."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megascale.ops.attention import causal_attention

B, S, D = 2, 7, 8


def formula(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, dropout: float) -> Tensor:
    """One query at a time: a softmax over the keys up to it, of which dropout removes some."""
    b, heads, s, d = q.shape
    group = heads // k.shape[1]
    rows = []
    for sample in range(b):
        for head in range(heads):
            keys, values = k[sample, head // group], v[sample, head // group]
            for i in range(s):
                weights = torch.softmax(keys[: i + 1] @ q[sample, head, i] / math.sqrt(d), 0)
                if keep is not None:
                    weights = weights * keep[sample, head, i, : i + 1] / (1 - dropout)
                rows.append(weights @ values[: i + 1])
    return torch.stack(rows).view(b, heads, s, d)


def qkv(heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, heads, S, D), (B, kv_heads, S, D), (B, kv_heads, S, D)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.to(dtype).requires_grad_() for t in drawn]


def mask(heads: int, dropout: float) -> Tensor:
    return torch.rand(B, heads, S, S, generator=torch.Generator().manual_seed(1)) >= dropout


def with_gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


heads = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])


@heads
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_fp64(heads: int, kv_heads: int, dropout: float) -> None:
    given = qkv(heads, kv_heads)
    keep = mask(heads, dropout) if dropout else None
    ours = with_gradients(causal_attention(*given, keep, dropout), given)
    expected = with_gradients(formula(*given, keep, dropout), given)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@heads
def test_a_mask_that_drops_nothing_is_no_dropout(heads: int, kv_heads: int) -> None:
    given = qkv(heads, kv_heads)
    ones = torch.ones(B, heads, S, S, dtype=torch.bool)
    with_mask = with_gradients(causal_attention(*given, ones, 0.0), given)
    without = with_gradients(causal_attention(*given, None, 0.0), given)
    for one, other in zip(with_mask, without, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_bf16(dropout: float) -> None:
    given = qkv(6, 2, torch.bfloat16)
    keep = mask(6, dropout) if dropout else None
    ours = with_gradients(causal_attention(*given, keep, dropout), given)
    exact = [t.detach().double().requires_grad_() for t in given]
    expected = with_gradients(formula(*exact, keep, dropout), exact)
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one.double() - other).norm() / other.norm()) < 2.0**-7
