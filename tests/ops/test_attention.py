"""Causal attention, to the whole past and to a window of it, against its formula, query by query."""

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

from megascale.layout.windows import BLOCK
from megascale.ops.attention import causal_attention, sliding_attention

B, S, D = 2, 7, 8


def formula(q: Tensor, k: Tensor, v: Tensor, window: int | None, keep: Tensor | None, dropout: float) -> Tensor:
    """One query at a time: a softmax over the keys up to it, in its window, of which dropout removes some."""
    b, heads, s, d = q.shape
    group = heads // k.shape[1]
    rows = []
    for sample in range(b):
        for head in range(heads):
            for i in range(s):
                seen = slice(0 if window is None else max(0, i - window + 1), i + 1)
                keys, values = k[sample, head // group, seen], v[sample, head // group, seen]
                weights = torch.softmax(keys @ q[sample, head, i] / math.sqrt(d), 0)
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
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


heads = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
windows = pytest.mark.parametrize("window", [None, 1, 3, 6, 7, 8])


@heads
@windows
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_fp64(heads: int, kv_heads: int, window: int | None, dropout: float) -> None:
    given = qkv(heads, kv_heads)
    keep = mask(heads, dropout) if dropout else None
    ours = with_gradients(causal_attention(*given, window, keep, dropout), given)
    assert_close(ours, with_gradients(formula(*given, window, keep, dropout), given))


@given(
    s=st.integers(1, 24),
    window=st.integers(1, 24),
    block=st.integers(1, 26),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
)
@settings(max_examples=80)
def test_any_window_in_any_blocks(s: int, window: int, block: int, heads: tuple[int, int]) -> None:
    leaves = qkv(*heads, s=s, b=1)
    ours = with_gradients(sliding_attention(*leaves, window, block), leaves)
    assert_close(ours, with_gradients(formula(*leaves, window, None, 0.0), leaves))


@pytest.mark.parametrize("s", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("window", [2, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_blocks_as_they_are(s: int, window: int) -> None:
    """With the strides that the network gives: heads side by side in one tensor."""
    leaves = qkv(2, 1, s=s, b=1)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in leaves]
    ours = with_gradients(causal_attention(*strided, window, None, 0.0), leaves)
    q, k, v = leaves
    distance = torch.arange(s)[:, None] - torch.arange(s)
    hidden = (distance < 0) | (distance >= window)
    dense = (q @ k.mT / math.sqrt(D)).masked_fill(hidden, -math.inf).softmax(-1) @ v
    assert_close(ours, with_gradients(dense, leaves))


@heads
@windows
def test_a_mask_that_drops_nothing_is_no_dropout(heads: int, kv_heads: int, window: int | None) -> None:
    given = qkv(heads, kv_heads)
    ones = torch.ones(B, heads, S, S, dtype=torch.bool)
    with_mask = with_gradients(causal_attention(*given, window, ones, 0.0), given)
    assert_close(with_mask, with_gradients(causal_attention(*given, window, None, 0.0), given))


@pytest.mark.parametrize("window", [None, 2, 6])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_bf16(window: int | None, dropout: float) -> None:
    given = qkv(6, 2, torch.bfloat16)
    keep = mask(6, dropout) if dropout else None
    ours = with_gradients(causal_attention(*given, window, keep, dropout), given)
    exact = [t.detach().double().requires_grad_() for t in given]
    expected = with_gradients(formula(*exact, window, keep, dropout), exact)
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one.double() - other).norm() / other.norm()) < 2.0**-7


def test_gradients_in_bf16_are_added_up_wide() -> None:
    """Of keys that forty blocks of queries see."""
    leaves = qkv(2, 1, torch.bfloat16, s=160, b=1)
    ours = with_gradients(sliding_attention(*leaves, 159, block=4), leaves)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = with_gradients(sliding_attention(*exact, 159, block=4), exact)
    for one, other in zip(ours, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 2.0**-7


class Sizes(TorchDispatchMode):
    """Elements of what operations return: the largest storage, and all together."""

    largest = total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.untyped_storage().size() // each.element_size())
                self.total += each.numel()
        return found


def sizes(s: int, window: int, keep: Tensor | None = None, kernel: SDPBackend = SDPBackend.FLASH_ATTENTION) -> Sizes:
    """Of a forward and a backward."""
    leaves = qkv(2, 1, torch.float32, s=s, b=1)
    with sdpa_kernel(kernel), Sizes() as mode:
        torch.autograd.grad(causal_attention(*leaves, window, keep, 0.0).sum(), leaves)
    return mode


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_no_matrix_of_all_scores_is_formed(kernel: SDPBackend) -> None:
    """Neither scores, which torch's plain kernel would show, nor masks; and twice the sequence is twice the work."""
    s, window = 2048, 128
    found, twice = sizes(s, window, kernel=kernel), sizes(2 * s, window, kernel=kernel)
    assert found.largest <= 2 * BLOCK * (window + BLOCK) < s * s / 16
    assert twice.largest <= max(found.largest, 2 * 2 * s * D)
    assert twice.total <= 2.1 * found.total
    whole = torch.ones(1, 2, s, s, dtype=torch.bool)
    assert sizes(s, window, whole).largest >= s * s, "such a matrix would be seen"


def test_masked_blocks_are_not_computed() -> None:
    s, window, heads = 8 * BLOCK, 100, 2
    leaves = qkv(heads, heads, torch.float32, s=s, b=1)
    counted = []
    for seen in (window, None):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            torch.autograd.grad(causal_attention(*leaves, seen, None, 0.0).sum(), leaves)
        counted.append(counter.get_total_flops())
    each = 3 * 4 * heads * D  # FLOPs of a query and a key, forwards and backwards
    blocks = BLOCK * BLOCK + (s - BLOCK) * (window - 1 + BLOCK)  # the first block has nothing before it
    assert counted == [each * blocks, each * s * s]
