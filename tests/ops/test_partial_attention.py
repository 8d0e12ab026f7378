"""Attention in parts equals attention at once, forward and backward, wherever queries and keys are cut."""

from __future__ import annotations

import inspect
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megascale.layout.document_shards import shard_documents
from megascale.layout.mask_blocks import mask_blocks
from megascale.layout.sequence_shard import Spans, TokenSpan, shard_sequence
from megascale.layout.windows import QUERY_BLOCK
from megascale.ops import flash_partial
from megascale.ops.boundaries import Boundaries
from megascale.ops.core_attention import AttentionMask, torch_attend
from megascale.ops.flash_partial import FlashPartialAttention
from megascale.ops.partial_attention import (
    Accumulator,
    AttentionResult,
    Gradients,
    PartialAttention,
    TorchPartialAttention,
)
from tests.marks import only_quick_rows

CPU = torch.device("cpu")
Starts = tuple[tuple[int, ...], ...] | None
STARTS = ((0, 5, 6, 19), (0,))


def tensors(heads: int, kv_heads: int, s: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return random q, k, v and a gradient of the output, each [2, heads, s, 8]."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, count, s, 8) for count in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def indices(spans: Spans) -> list[int]:
    return [position for span in spans for position in range(*span)]


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Stand in for flash-attn's function of this signature: windows are aligned at the last query and the last key."""
    assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
    assert causal == (window_size_right == 0), "a causal mask has no keys to the right"
    outs, sums = [], []
    for rows, keys in zip(ranges(cu_seqlens_q, max_seqlen_q), ranges(cu_seqlens_k, max_seqlen_k), strict=True):
        scores = hidden_scores(q[rows], k[keys], softmax_scale, window_size_left, window_size_right, max_seqlen_k)
        outs.append((scores.softmax(-1) @ by_head(v[keys], q.shape[1])).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1), torch.empty(0), torch.empty(2)


def varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    assert softmax_lse.is_contiguous() and softmax_lse.shape == (q.shape[1], q.shape[0])
    assert dq is not None and dk is not None and dv is not None
    for rows, keys in zip(ranges(cu_seqlens_q, max_seqlen_q), ranges(cu_seqlens_k, max_seqlen_k), strict=True):
        scores = hidden_scores(q[rows], k[keys], softmax_scale, window_size_left, window_size_right, max_seqlen_k)
        weights = (scores - softmax_lse[:, rows].unsqueeze(-1)).exp()
        grad, heads = dout[rows].transpose(0, 1), q.shape[1]
        slope = weights * (grad @ by_head(v[keys], heads).mT - (grad * out[rows].transpose(0, 1)).sum(-1, keepdim=True))
        dq[rows] = (slope @ by_head(k[keys], heads) * softmax_scale).transpose(0, 1)
        for into, found in ((dk, slope.mT @ q[rows].transpose(0, 1) * softmax_scale), (dv, weights.mT @ grad)):
            into[keys] = found.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
    return torch.empty(0)


def ranges(cu_seqlens: Tensor, longest: int) -> list[slice]:
    assert cu_seqlens.dtype == torch.int32 and longest >= int(cu_seqlens.diff().max())
    return [slice(*pair) for pair in itertools.pairwise(cu_seqlens.tolist())]


def by_head(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1)


def hidden_scores(q: Tensor, k: Tensor, scale: float, left: int, right: int, longest: int) -> Tensor:
    """Return scores as the kernels hide them, for which a side of a window is at most the `longest` keys, where the
    other side is given.
    """
    left, right = (-1 if side >= longest else side for side in (left, right))
    if (left < 0) != (right < 0):
        left, right = (longest if side < 0 else side for side in (left, right))
    place = torch.arange(k.shape[0]) - (torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0])
    hidden = torch.zeros_like(place, dtype=torch.bool)
    hidden |= (place < -left) if left >= 0 else hidden
    hidden |= (place > right) if right >= 0 else hidden
    return (q.transpose(0, 1) @ by_head(k, q.shape[1]).mT * scale).masked_fill(hidden, -math.inf)


def in_parts(
    given: list[Tensor], parts: tuple[Spans, ...], window: int | None, starts: Starts, attend: PartialAttention
) -> list[Tensor]:
    """CoreAttention with the queries and the keys of every part in turn, as the ranks of a ring would."""
    q, k, v, grad = given
    s = q.shape[2]
    wide = [torch.zeros(t.shape, dtype=torch.promote_types(q.dtype, torch.float32)) for t in (q, q, k, v)]
    for mine in parts:
        own = indices(mine)
        queries, of_out = q[:, :, own], grad[:, :, own]
        total = Accumulator(queries)
        pairs = [(indices(spans), mask_blocks(mine, spans, window, starts, s)) for spans in parts]
        for theirs, blocks in pairs:
            attend.add_forward(total, queries, k[:, :, theirs], v[:, :, theirs], blocks)
        out = total.out.to(q.dtype)
        wide[0][:, :, own] = total.out
        for theirs, blocks in pairs:
            grads = Gradients(
                *(torch.zeros_like(t[:, :, at]) for t, at in zip(wide[1:], (own, theirs, theirs), strict=True))
            )
            attended = AttentionResult(queries, out, total.lse, of_out)
            attend.add_backward(grads, attended, k[:, :, theirs], v[:, :, theirs], blocks)
            for into, at, found in zip(wide[1:], (own, theirs, theirs), grads, strict=True):
                into[:, :, at] += found
    return wide


def at_once(given: list[Tensor], window: int | None, starts: Starts, scale: float) -> list[Tensor]:
    grad = given[3]
    q, k, v = leaves = [t.clone().requires_grad_() for t in given[:3]]
    boundaries = None if starts is None else Boundaries(starts, grad.shape[2], CPU)
    out = torch_attend(scale)(q, k, v, AttentionMask(window, boundaries))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def aten_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float, window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Stand in for torch's `_flash_attention_forward`."""
    lengths = cum_seq_q, cum_seq_k, max_q, max_k
    found = varlen_forward(
        query, key, value, *lengths, dropout_p, scale, is_causal, window_size_left, window_size_right
    )  # fmt: skip
    assert not return_debug_mask
    return *found, torch.empty(0)


def aten_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor,
    cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *,
    scale: float, window_size_left: int, window_size_right: int,
) -> list[Tensor]:  # fmt: skip
    """Stand in for torch's `_flash_attention_backward`."""
    found = [torch.empty_like(t) for t in (query, key, value)]
    varlen_backward(
        grad_out, query, key, value, out, logsumexp, *found, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale,
        is_causal, window_size_left, window_size_right, 0.0, None, False,
    )  # fmt: skip
    return found


class Flash3:
    """Stands in for the operators that flash-attn 3 registers, by their arguments."""

    @staticmethod
    def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
        softcap: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        sides = window_size_left, window_size_right
        return varlen_forward(q, k, v, *lengths, 0.0, softmax_scale, causal, *sides, softcap)

    @staticmethod
    def _flash_attn_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *, cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dq: Tensor, dk: Tensor, dv: Tensor,
        softmax_scale: float, is_causal: bool, window_size_left: int, window_size_right: int, softcap: float,
        deterministic: bool,
    ) -> Tensor:  # fmt: skip
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        sides, given = (window_size_left, window_size_right), (dout, q, k, v, out, softmax_lse, dq, dk, dv)
        return varlen_backward(
            *given, *lengths, 0.0, softmax_scale, is_causal, *sides, softcap, None, deterministic
        )  # fmt: skip


ATTENTION: dict[str, PartialAttention] = {
    "torch": TorchPartialAttention(0.3),
    "flash": FlashPartialAttention(varlen_forward, varlen_backward, 0.3),
    "flash 3": FlashPartialAttention(*flash_partial.version_3(Flash3), 0.3),
    "varlen": FlashPartialAttention(flash_partial._varlen_forward, flash_partial._varlen_backward, 0.3),
}


@pytest.fixture
def kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the operators that torch has on GPUs alone."""
    operators = SimpleNamespace(_flash_attention_forward=aten_forward, _flash_attention_backward=aten_backward)
    monkeypatch.setattr(flash_partial, "aten", operators)


@pytest.mark.parametrize(
    ("capability", "missing", "operators", "serves"),
    [
        ((9, 0), None, Flash3, True),
        ((10, 0), None, Flash3, False),
        ((9, 0), "flash_attn_3 is not installed", Flash3, False),
        ((9, 0), None, SimpleNamespace(fwd=None, bwd=None), False),
    ],
)
def test_version_3_serves_on_hopper_with_operators_of_known_arguments(
    capability: tuple[int, int], missing: str | None, operators: Any, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_partial, "FLASH3", SimpleNamespace(missing_reason=lambda: missing))
    monkeypatch.setattr(torch.ops, "flash_attn_3", operators, raising=False)
    context: Any = SimpleNamespace(device=SimpleNamespace(capability=capability))
    assert flash_partial._has_version_3(context) == serves
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not flash_partial._has_version_3(context)


@pytest.mark.parametrize("stand_in", [aten_forward, aten_backward])
def test_stand_ins_take_the_operators_arguments(stand_in: Any) -> None:
    ours = inspect.signature(stand_in).parameters
    schema = getattr(torch.ops.aten, f"_flash_attention_{stand_in.__name__.removeprefix('aten_')}").default._schema
    optional = {argument.name for argument in schema.arguments if argument.has_default_value()}
    theirs = {argument.name: argument.kwarg_only for argument in schema.arguments if argument.name in ours}
    assert {name: p.kind == p.KEYWORD_ONLY for name, p in ours.items()} == theirs
    assert {argument.name for argument in schema.arguments} - optional <= ours.keys()
    assert list(ours) == list(theirs), "in the same order"


CUTS = [(1, 1), (2, 1), (3, 1), (2, 2), (1, 4)]
"""Divisions of keys and of heads."""

ALL = [
    (*cut, window, starts, kv_heads, backend)
    for cut in CUTS for window in (None, 1, 3, 11, 24) for starts in (None, STARTS) for kv_heads in (4, 2)
    for backend in ATTENTION
]  # fmt: skip
QUICK = ALL[::3]
"""Every third: each value of a parameter with each of any other."""


@pytest.mark.usefixtures("kernels_of_a_gpu")
@pytest.mark.parametrize(
    ("keys", "heads", "window", "starts", "kv_heads", "backend"), only_quick_rows(ALL, *QUICK), ids=str
)
def test_parts_add_up_to_the_whole(
    keys: int, heads: int, window: int | None, starts: Starts, kv_heads: int, backend: str
) -> None:
    given = tensors(4, kv_heads, 24)
    parts = shard_sequence(24, keys, heads, 0).parts
    found = in_parts(given, parts, window, starts, ATTENTION[backend])
    for mine, expected in zip(found, at_once(given, window, starts, 0.3), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-13)


class LayerOps(TorchDispatchMode):
    """Counts the operators that run, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @property
    def count(self) -> int:
        return len(self.names)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = [value.alias_info for value in function._schema.returns]
        if not any(alias is not None and not alias.is_write for alias in returned):
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("documents", [4, 16])
def test_the_number_of_kernels_does_not_grow_with_documents(documents: int) -> None:
    """Two ranks have chunks of documents of eight tokens."""
    length, calls = 8 * documents, list[int]()

    def forward(q: Tensor, *args: Any, **keys: Any) -> tuple[Tensor, Tensor]:
        calls.append(q.shape[0])
        return q, q.new_zeros(q.shape[1], q.shape[0])

    def backward(grad: Tensor, *args: Any, **keys: Any) -> None:
        calls.append(grad.shape[0])

    attend, starts = FlashPartialAttention(forward, backward, 0.3), [*range(0, length, 8)]
    q, k, v, grad = (t[:1, :, : length // 2] for t in tensors(2, 1, length))
    total, grads = Accumulator(q), Gradients(*(torch.zeros_like(t) for t in (q, k, v)))
    first, second = shard_documents(starts, length, 2, 1, 0).parts
    for theirs in (first, second):
        blocks = mask_blocks(first, theirs, None, [starts], length)
        attend.add_forward(total, q, k, v, blocks)  # makes the indices
        calls.clear()
        with LayerOps() as operators:
            attend.add_forward(total, q, k, v, blocks)
            attend.add_backward(grads, AttentionResult(q, total.out, total.lse, grad), k, v, blocks)
        assert len(calls) <= 4 and sum(calls) >= length // 2
        assert operators.count <= 72


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("batch", [1, 2])
def test_bands_of_whole_rows_are_slices(rank: int, batch: int) -> None:
    """In a ring of whole rows nothing is gathered or scattered; with one row nothing is copied for the kernels."""
    pointers = set[int]()

    def forward(q: Tensor, k: Tensor, v: Tensor, *args: Any, **keys: Any) -> tuple[Tensor, Tensor]:
        pointers.update(t.untyped_storage().data_ptr() for t in (q, k, v))
        assert all(t.stride(-1) == 1 for t in (q, k, v))
        return torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])

    attend = FlashPartialAttention(forward, lambda *args, **keys: None, 0.3)
    q, k, v, grad = (t[:batch, :, :16] for t in tensors(2, 1, 48))
    parts = shard_sequence(48, 3, 1, 0).parts
    total, grads = Accumulator(q), Gradients(*(torch.zeros_like(t) for t in (q, k, v)))
    with LayerOps() as operators:
        for theirs in parts:
            blocks = mask_blocks(parts[rank], theirs, None)
            attend.add_forward(total, q, k, v, blocks)
            attend.add_backward(grads, AttentionResult(q, total.out, total.lse, grad), k, v, blocks)
    assert not {"index", "index_put", "index_put_", "_index_put_impl_"}.intersection(operators.names)
    own = {t.untyped_storage().data_ptr() for t in (q, k, v)}
    assert (pointers == own) == (batch == 1)


@pytest.mark.parametrize("window", [None, 40, QUERY_BLOCK + 7])
def test_blocks_of_queries(window: int | None) -> None:
    """Windows shorter and longer than the blocks in which a window is computed."""
    given = tensors(2, 1, 3 * QUERY_BLOCK)
    parts = (
        (TokenSpan(0, QUERY_BLOCK - 5), TokenSpan(2 * QUERY_BLOCK + 3, 3 * QUERY_BLOCK)),
        (TokenSpan(QUERY_BLOCK - 5, 2 * QUERY_BLOCK + 3),),
    )
    found = in_parts(given, parts, window, None, ATTENTION["torch"])
    for mine, expected in zip(found, at_once(given, window, None, 0.3), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-12)


def test_parts_in_bf16_lose_no_more_than_the_kernel() -> None:
    """Parts are summed in fp32: four parts are as close to fp64 as attention at once, within a factor of two."""
    given = tensors(4, 2, 64, torch.bfloat16)
    exact = at_once([t.double() for t in given], None, None, 0.3)
    found = in_parts(given, shard_sequence(64, 4, 1, 0).parts, None, None, ATTENTION["torch"])
    plain = at_once(given, None, None, 0.3)
    for mine, once, expected in zip(found, plain, exact, strict=True):
        assert (mine.double() - expected).norm() < 2 * (once.double() - expected).norm()


def test_a_query_without_keys_stays_empty() -> None:
    q, k, v, _ = tensors(4, 2, 8)
    total = Accumulator(q)
    blocks = mask_blocks((TokenSpan(0, 8),), (TokenSpan(4, 12),), None)
    TorchPartialAttention().add_forward(total, q, k, v, blocks)
    assert torch.isinf(total.lse[:, :, :4]).all()
    assert not total.out[:, :, :4].any()
    assert torch.isfinite(total.lse[:, :, 4:]).all()
