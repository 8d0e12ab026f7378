"""Sparse attention equals attention with the mask of the pattern, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megascale.config.sparse_pattern import SparsePattern
from megascale.layout.sequence_shard import Spans, TokenSpan, shard_sequence
from megascale.ops.boundaries import Boundaries
from megascale.ops.core_attention import AttentionMask, torch_attend
from megascale.ops.head_blocks import attend_within
from megascale.ops.partial_attention import PartialAttention
from tests.layout.sparse_masks import mask_of
from tests.ops.test_partial_attention import ATTENTION, CPU, kernels_of_a_gpu, tensors

LENGTH = 40
STARTS = ((0, 5, 6, 19), (0,))
PATTERNS = [SparsePattern(1, 2, 3), SparsePattern(2, 4, 4), SparsePattern(2, 3, 1), SparsePattern(1, 4, 16)]


def masked(given: list[Tensor], mask: Tensor, scale: float) -> list[Tensor]:
    """Attention with all scores, of which `mask` [b, heads, n, m] hides some; and the gradients."""
    q, k, v = leaves = [t.clone().requires_grad_() for t in given[:3]]
    groups = q.shape[1] // k.shape[1]
    scores = (q @ k.repeat_interleave(groups, 1).mT * scale).masked_fill(~mask, -math.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(groups, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]


def with_gradients(given: list[Tensor], attend: object) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in given[:3]]
    out = attend(*leaves)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]


def masks(pattern: SparsePattern, first: int, heads: int, packed: bool) -> Tensor:
    numbers = range(first, first + heads)
    return torch.stack([mask_of(pattern, numbers, LENGTH, starts if packed else (0,)) for starts in STARTS])


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize(("heads", "kv_heads", "first"), [(4, 4, 0), (4, 2, 0), (8, 2, 8), (2, 1, 2)])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_attention_equals_that_with_a_mask(
    pattern: SparsePattern, heads: int, kv_heads: int, first: int, packed: bool
) -> None:
    given = tensors(heads, kv_heads, LENGTH)
    boundaries = Boundaries(STARTS, LENGTH, CPU) if packed else None
    mask = AttentionMask(pattern, boundaries, heads=range(first, first + heads))
    ours = with_gradients(given, lambda q, k, v: torch_attend(0.3)(q, k, v, mask))
    for found, expected in zip(ours, masked(given, masks(pattern, first, heads, packed), 0.3), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures(kernels_of_a_gpu.__name__)
@pytest.mark.parametrize("name", ATTENTION)
def test_every_kernel_computes_the_blocks(name: str) -> None:
    """Of queries that a rank of a ring has, with all keys."""
    pattern, heads, partial = SparsePattern(2, 4, 4), range(4, 8), ATTENTION[name]
    for rank in range(2):
        spans = shard_sequence(LENGTH, 2, 1, rank).spans
        own = [place for span in spans for place in range(*span)]
        given = tensors(4, 2, LENGTH)
        given = [given[0][:, :, own], given[1], given[2], given[3][:, :, own]]
        found = _attend(given, spans, pattern, heads, partial)
        expected = masked(given, masks(pattern, 4, 4, packed=True)[:, :, own], 0.3)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def _attend(
    given: list[Tensor], spans: Spans, pattern: SparsePattern, heads: range, partial: PartialAttention
) -> list[Tensor]:
    mask = AttentionMask(pattern, Boundaries(STARTS, LENGTH, CPU), heads=heads)
    visible = mask.blocks(spans, (TokenSpan(0, LENGTH),), LENGTH)
    return with_gradients(given, lambda q, k, v: attend_within(q, k, v, visible, partial))


def test_blocks_are_found_once_for_all_layers() -> None:
    whole, boundaries = (TokenSpan(0, LENGTH),), Boundaries(STARTS, LENGTH, CPU)
    for bounds in (None, boundaries):
        mask = AttentionMask(PATTERNS[0], bounds, heads=range(4))
        first, again = (each.blocks(whole, whole, LENGTH) for each in (mask, mask._replace(dropout=0.1)))
        assert first is again
        assert mask._replace(heads=range(1, 5)).blocks(whole, whole, LENGTH) is not first


def test_a_pattern_is_no_window() -> None:
    with pytest.raises(TypeError, match="no window"):
        _ = AttentionMask(PATTERNS[0]).window
