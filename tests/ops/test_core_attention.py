"""Causal attention, full and in a sliding window, against a formula per query."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megascale.layout.windows import QUERY_BLOCK
from megascale.ops.core_attention import AttentionMask, causal_attention, sliding_attention, torch_attend
from megascale.ops.softcapped_attention import softcapped_attention

B, S, D = 2, 7, 8


def formula(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, keep: Tensor | None, dropout: float,
    scale: float | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention query by query: a softmax over the keys of the window, then dropout."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    b, heads, s, d = q.shape
    group = heads // k.shape[1]
    rows = []
    for sample in range(b):
        for head in range(heads):
            for i in range(s):
                seen = slice(0 if window is None else max(0, i - window + 1), i + 1)
                keys, values = k[sample, head // group, seen], v[sample, head // group, seen]
                scores = keys @ q[sample, head, i] * scale
                weights = torch.softmax(scores if softcap is None else softcap * torch.tanh(scores / softcap), 0)
                if keep is not None:
                    weights = weights * keep[sample, head, i, seen] / (1 - dropout)
                rows.append(weights @ values)
    return torch.stack(rows).view(b, heads, s, d)


def qkv(heads: int, kv_heads: int, dtype: torch.dtype = torch.float64, s: int = S, b: int = B) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(b, heads, s, D), (b, kv_heads, s, D), (b, kv_heads, s, D)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.to(dtype).requires_grad_() for t in drawn]


def mask(heads: int, dropout: float) -> Tensor:
    return torch.rand(B, heads, S, S, generator=torch.Generator().manual_seed(1)) >= dropout


def with_gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def assert_close(ours: list[Tensor], expected: list[Tensor]) -> None:
    for actual, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


heads = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
windows = pytest.mark.parametrize("window", [None, 1, 3, 6, 7, 8])


@heads
@windows
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize(("scale", "softcap"), [(None, None), (0.2, None), (0.8, 1.5)])
def test_fp64_equals_the_formula(
    heads: int, kv_heads: int, window: int | None, dropout: float, scale: float | None, softcap: float | None
) -> None:
    given = qkv(heads, kv_heads)
    keep = mask(heads, dropout) if dropout else None
    ours = with_gradients(torch_attend(scale, softcap)(*given, AttentionMask(window, None, keep, dropout)), given)
    assert_close(ours, with_gradients(formula(*given, window, keep, dropout, scale, softcap), given))


@heads
@pytest.mark.parametrize("block", [1, 3, 7])
@pytest.mark.parametrize("window", [2, 7])
def test_a_soft_cap_is_computed_in_blocks_of_queries(heads: int, kv_heads: int, block: int, window: int) -> None:
    given = qkv(heads, kv_heads)
    ours = with_gradients(softcapped_attention(*given, window, 0.8, 1.5, block), given)
    assert_close(ours, with_gradients(formula(*given, window, None, 0.0, 0.8, 1.5), given))


def test_scores_with_a_soft_cap_are_not_rounded_to_bf16() -> None:
    """Scores near a cap of 50 would be off by 0.1, and weights by 10%."""
    given = [(4 * t.detach()).bfloat16().requires_grad_() for t in qkv(4, 2)]
    exact = [t.detach().double().requires_grad_() for t in given]
    ours = with_gradients(causal_attention(*given, None, 1.0, 50.0), given)
    expected = with_gradients(causal_attention(*exact, None, 1.0, 50.0), exact)
    for actual, wanted in zip(ours, expected, strict=True):
        assert actual.dtype == torch.bfloat16
        assert (actual.double() - wanted).abs().max() < 2.0**-6 * wanted.abs().max()


@given(
    s=st.integers(1, 24),
    window=st.integers(1, 24),
    block=st.integers(1, 26),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
)
@settings(max_examples=80)
def test_any_window_with_any_block_size(s: int, window: int, block: int, heads: tuple[int, int]) -> None:
    leaves = qkv(*heads, s=s, b=1)
    ours = with_gradients(sliding_attention(*leaves, window, block), leaves)
    assert_close(ours, with_gradients(formula(*leaves, window, None, 0.0), leaves))


@pytest.mark.parametrize("s", [QUERY_BLOCK - 1, QUERY_BLOCK, QUERY_BLOCK + 1, 3 * QUERY_BLOCK + 5])
@pytest.mark.parametrize("window", [2, QUERY_BLOCK, QUERY_BLOCK + 1, 2 * QUERY_BLOCK])
def test_the_default_block_size(s: int, window: int) -> None:
    """Inputs have the strides of the model: heads adjacent in one tensor."""
    leaves = qkv(2, 1, s=s, b=1)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in leaves]
    ours = with_gradients(causal_attention(*strided, window), leaves)
    q, k, v = leaves
    distance = torch.arange(s)[:, None] - torch.arange(s)
    hidden = (distance < 0) | (distance >= window)
    dense = (q @ k.mT / math.sqrt(D)).masked_fill(hidden, -math.inf).softmax(-1) @ v
    assert_close(ours, with_gradients(dense, leaves))


@heads
@windows
def test_a_mask_without_drops_equals_no_dropout(heads: int, kv_heads: int, window: int | None) -> None:
    given = qkv(heads, kv_heads)
    ones = torch.ones(B, heads, S, S, dtype=torch.bool)
    with_mask = with_gradients(torch_attend()(*given, AttentionMask(window, None, ones)), given)
    assert_close(with_mask, with_gradients(causal_attention(*given, window), given))


@pytest.mark.parametrize("window", [None, 2, 6])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_bf16_equals_the_formula_up_to_rounding(window: int | None, dropout: float) -> None:
    given = qkv(6, 2, torch.bfloat16)
    keep = mask(6, dropout) if dropout else None
    ours = with_gradients(torch_attend()(*given, AttentionMask(window, None, keep, dropout)), given)
    exact = [t.detach().double().requires_grad_() for t in given]
    expected = with_gradients(formula(*exact, window, keep, dropout), exact)
    for actual, wanted in zip(ours, expected, strict=True):
        assert actual.dtype == torch.bfloat16
        assert float((actual.double() - wanted).norm() / wanted.norm()) < 2.0**-7


def test_bf16_gradients_accumulate_in_fp32() -> None:
    """Forty blocks of queries contribute to the gradient of a key."""
    leaves = qkv(2, 1, torch.bfloat16, s=160, b=1)
    ours = with_gradients(sliding_attention(*leaves, 159, block=4), leaves)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = with_gradients(sliding_attention(*exact, 159, block=4), exact)
    for actual, wanted in zip(ours, expected, strict=True):
        assert float((actual.double() - wanted).norm() / wanted.norm()) < 2.0**-7


class Sizes(TorchDispatchMode):
    """Elements of operators' results: the largest storage, and the total."""

    largest = total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for result in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(result, Tensor):
                self.largest = max(self.largest, result.untyped_storage().size() // result.element_size())
                self.total += result.numel()
        return out


def sizes(s: int, window: int, keep: Tensor | None = None, kernel: SDPBackend = SDPBackend.FLASH_ATTENTION) -> Sizes:
    """Record the sizes of a forward and a backward."""
    leaves = qkv(2, 1, torch.float32, s=s, b=1)
    with sdpa_kernel(kernel), Sizes() as mode:
        torch.autograd.grad(torch_attend()(*leaves, AttentionMask(window, None, keep)).sum(), leaves)
    return mode


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_memory_is_linear_in_sequence_length(kernel: SDPBackend) -> None:
    """Neither scores nor masks have s x s elements, and twice the sequence is twice the work."""
    s, window = 2048, 128
    single, twice = sizes(s, window, kernel=kernel), sizes(2 * s, window, kernel=kernel)
    assert single.largest <= 2 * QUERY_BLOCK * (window + QUERY_BLOCK) < s * s / 16
    assert twice.largest <= max(single.largest, 2 * 2 * s * D)
    assert twice.total <= 2.1 * single.total
    keep = torch.ones(1, 2, s, s, dtype=torch.bool)
    assert sizes(s, window, keep).largest >= s * s, "an s x s matrix would be detected"


def test_masked_blocks_are_not_computed() -> None:
    s, window, heads = 8 * QUERY_BLOCK, 100, 2
    leaves = qkv(heads, heads, torch.float32, s=s, b=1)
    counted = []
    for span in (window, None):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            torch.autograd.grad(causal_attention(*leaves, span).sum(), leaves)
        counted.append(counter.get_total_flops())
    per_pair = 3 * 4 * heads * D  # FLOPs per query and key, forward and backward
    # the first block has no keys to its left
    pairs = QUERY_BLOCK * QUERY_BLOCK + (s - QUERY_BLOCK) * (window - 1 + QUERY_BLOCK)
    assert counted == [per_pair * pairs, per_pair * s * s]
