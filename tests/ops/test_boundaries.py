"""Boundaries of documents, and attention within them by every backend, against attention to each document alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.flop_counter import FlopCounterMode

from megascale.layout.packs import equal_documents
from megascale.layout.windows import QUERY_BLOCK
from megascale.ops import compiled
from megascale.ops.boundaries import Boundaries
from megascale.ops.core_attention import AttentionMask, CoreAttention, causal_attention, torch_attend
from megascale.ops.flash import flash
from megascale.ops.flex import BLOCK, block_mask, flex
from megascale.ops.select import unsupported_reason
from megascale.ops.te_attention import te_attend
from tests.ops.settings import GPU, setting
from tests.plan.account.executed_flops import count_document_scores

CPU = torch.device("cpu")
S = 12
ROWS = ((0, 3, 4, 9), (0,))
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def qkv(s: int = S, b: int = 2, d: int = 8, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(b, n, s, d) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def alone(given: list[Tensor], boundaries: Boundaries, window: int | None, **options: Any) -> Tensor:
    """CoreAttention to each document by itself."""
    rows = []
    for row, lengths in enumerate(boundaries.lengths):
        parts = zip(*(t[row : row + 1].split(list(lengths), 2) for t in given), strict=True)
        rows.append(torch.cat([causal_attention(*part, window, **options) for part in parts], 2))
    return torch.cat(rows)


def with_gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def test_positions_restart_and_offsets_span_the_rows() -> None:
    rows = [np.array([0, 1, 2, 0, 0, 1]), np.arange(6)]
    found = Boundaries(((0, 3, 4), (0,)), 6, CPU)
    assert found.lengths == ((3, 1, 2), (6,)) and found.longest == 6
    assert found.positions.T.tolist() == [row.tolist() for row in rows]
    assert found.documents.tolist() == [[0, 0, 0, 1, 2, 2], [0] * 6]
    assert found.cu_seqlens.tolist() == [0, 3, 4, 6, 12] and found.cu_seqlens.dtype == torch.int32


def test_padding_is_apart_from_documents() -> None:
    found = Boundaries(((0, 2, 3), (0,)), 5, CPU, (True, False))
    assert found.real_lengths == [2, 1, 5], "padding is none of the model's work"
    assert found.positions[:, 0].tolist() == [0, 1, 0, 0, 1], "positions that every model has"


@given(st.integers(1, 60), st.one_of(st.none(), st.integers(1, 80)))
def test_expected_documents_fill_a_row(s: int, length: int | None) -> None:
    lengths = equal_documents(s, length)
    assert sum(lengths) == s and set(lengths[:-1]) <= {length} and lengths[-1] <= (length or s)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("scale", "softcap"), [(None, None), (0.3, None), (0.8, 1.5)])
def test_torch_attends_within_documents(window: int | None, scale: float | None, softcap: float | None) -> None:
    given, boundaries = qkv(), Boundaries(ROWS, S, CPU)
    expected = with_gradients(alone(given, boundaries, window, scale=scale, softcap=softcap), given)
    attend = torch_attend(scale, softcap)
    every = torch.ones(2, 4, S, S, dtype=torch.bool)
    for keep in (None, every):  # with a mask of dropout all weights are computed in memory
        ours = with_gradients(attend(*given, AttentionMask(window, boundaries, keep)), given)
        for actual, wanted in zip(ours, expected, strict=True):
            torch.testing.assert_close(actual, wanted, **EXACT)
    whole = attend(*given, AttentionMask(window))
    if window != 1:
        assert not torch.allclose(whole, expected[0]), "a document would see the one before it"


@pytest.mark.parametrize("window", [None, 50, QUERY_BLOCK])
def test_long_and_short_documents(window: int | None) -> None:
    lengths = [QUERY_BLOCK + 30, 1, 5, QUERY_BLOCK - 6, 40, 2 * QUERY_BLOCK]
    starts = tuple(np.cumsum([0, *lengths[:-1]]).tolist())
    given = qkv(sum(lengths), 1)
    boundaries = Boundaries((starts,), sum(lengths), CPU)
    ours = with_gradients(torch_attend()(*given, AttentionMask(window, boundaries)), given)
    for actual, wanted in zip(ours, with_gradients(alone(given, boundaries, window), given), strict=True):
        torch.testing.assert_close(actual, wanted, **EXACT)


@pytest.mark.parametrize("window", [None, 100])
def test_scores_between_documents_are_not_computed(window: int | None) -> None:
    lengths = [500, 60, 60, 60, 30, 800]
    starts = tuple(np.cumsum([0, *lengths[:-1]]).tolist())
    given = qkv(sum(lengths), 1, heads=2, kv_heads=2)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = torch_attend()(*given, AttentionMask(window, Boundaries((starts,), sum(lengths), CPU)))
        torch.autograd.grad(out.sum(), given)
    scores = count_document_scores(lengths, window)
    assert counter.get_total_flops() == 3 * 4 * 2 * 8 * scores
    assert scores < sum(lengths) ** 2 / 2


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Stand in for flash-attn 2's `flash_attn_varlen_func`: [tokens, heads, d], and offsets of the sequences."""
    assert causal and dropout_p == 0 and torch.equal(cu_seqlens_q, cu_seqlens_k) and cu_seqlens_q.dtype == torch.int32
    lengths = cu_seqlens_q.diff().tolist()
    assert max(lengths) == max_seqlen_q == max_seqlen_k and sum(lengths) == len(q) == len(k)
    window = None if window_size == (-1, -1) else window_size[0] + 1
    parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
    return torch.cat([_one(*part, window, softmax_scale, softcap or None) for part in parts])


def varlen_3(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Stand in for flash-attn 3's, which in early releases returns the log-sum-exp too."""
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return varlen(q, k, v, *ends, 0.0, softmax_scale, causal, window_size, softcap), torch.zeros(1)


def _one(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None, softcap: float | None) -> Tensor:
    rows = [t.transpose(0, 1)[None] for t in (q, k, v)]
    return causal_attention(*rows, window, scale, softcap)[0].transpose(0, 1)


def thd(
    query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Tensor | None = None,
    qkv_format: str | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_kv_padded: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, attn_mask_type: str | None = None,
    window_size: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """Stand in for a call of Transformer Engine's DotProductAttention with packed sequences."""
    assert (qkv_format, attn_mask_type) == ("thd", "padding_causal") and window_size is not None
    assert cu_seqlens_q is not None and cu_seqlens_kv is not None and max_seqlen_q and max_seqlen_kv
    ends = cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
    size = (-1, -1) if window_size[0] == -1 else window_size
    return varlen(query_layer, key_layer, value_layer, *ends, causal=True, window_size=size).flatten(1)


def refused(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("this kernel does not know of documents")


BACKENDS: dict[str, Callable[[], CoreAttention]] = {
    "flash-attn 2": lambda: flash(refused, None, None, varlen),
    "flash-attn 3": lambda: flash(refused, None, None, varlen_3),
    "Transformer Engine": lambda: te_attend(thd),
    "FlexAttention": lambda: flex(flex_attention),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 4])
def test_backends_attend_within_documents(backend: str, window: int | None) -> None:
    heads = torch.randn(S, 2, 8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = list(heads.permute(1, 2, 0, 3).split([4, 2, 2], 1))  # [s, b, heads, d] in memory
    boundaries = Boundaries(ROWS, S, CPU)
    ours = BACKENDS[backend]()(*given, AttentionMask(window, boundaries))
    torch.testing.assert_close(ours, alone(given, boundaries, window), **EXACT)


@given(data=st.data(), window=st.sampled_from([1, 100, BLOCK, 300, 4 * BLOCK]))
def test_flex_skips_the_blocks_between_documents(data: st.DataObject, window: int) -> None:
    """Blocks are classified as create_block_mask does, which evaluates every score."""
    s = 4 * BLOCK
    inner = data.draw(st.sets(st.one_of(st.integers(1, s - 1), st.sampled_from([BLOCK, 2 * BLOCK])), max_size=8))
    blocks = block_mask(window, range(1), s, CPU, Boundaries(((0, *sorted(inner)), (0,)), s, CPU))
    expected = create_block_mask(blocks.mask_mod, 2, None, s, s, device="cpu", BLOCK_SIZE=BLOCK)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(blocks, name), getattr(expected, name)), name
    for name in ("kv_indices", "full_kv_indices"):
        assert torch.equal(getattr(blocks, name), getattr(expected, name)), name


def test_flex_builds_one_mask_for_all_layers() -> None:
    boundaries = Boundaries(ROWS, S, CPU)
    found = [block_mask(window, range(1), S, CPU, boundaries) for window in (4, 4, S)]
    assert found[0] is found[1] and found[0] is not found[2]


def test_other_documents_need_no_other_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention is compiled once for a window, not for the documents of every step."""
    from torch._dynamo.testing import CompileCounter  # takes a second, which every process that collects would need

    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    given = [t.detach().float() for t in qkv(BLOCK + 5, 1, 16)]
    attend = flex(compiled.compile_function(flex_attention))
    with torch.no_grad():
        for inner in (3, 70, BLOCK):
            boundaries = Boundaries(((0, inner),), BLOCK + 5, CPU)
            torch.testing.assert_close(
                attend(*given, AttentionMask(None, boundaries)), torch_attend()(*given, AttentionMask(None, boundaries))
            )
    assert counter.frame_count == 1


def test_documents_need_no_window() -> None:
    on_gpu = replace(setting(torch.bfloat16, GPU, head_dim=16), document_mask=True)
    reason = unsupported_reason("attention", "compile", on_gpu)
    assert reason is None or "not installed" in reason
