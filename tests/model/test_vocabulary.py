"""Vocabulary-parallel token embedding on real ranks, against torch's unsharded embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megascale.comm.group import single_rank_group
from megascale.comm.mesh import open_mesh
from megascale.config.model import ModelConfig
from megascale.core.rank import Rank
from megascale.layout.topology import Topology
from megascale.parallel.tp_overlap import TensorParallel
from megascale.parallel.vocabulary import VocabularyRange, vocab_parallel_embedding
from tests.runs import GPT
from tests.worlds import run_world

VOCABULARY, S, B, H = 101, 8, 3, 6
"""With tp = 4 a rank has 64 rows: the first is full, the second has 37 tokens, two have only padding."""

SPLITS = [1, 2, 4]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def axis_of(rank: Rank, tp: int, sequence: bool = False) -> TensorParallel:
    if tp == 1:
        return TensorParallel(single_rank_group("tp"), sequence)
    return TensorParallel(open_mesh(Topology(tp=tp), rank.rank, tied=False).tp, sequence)


def range_of(axis: TensorParallel) -> VocabularyRange:
    model = ModelConfig.model_validate(GPT | {"vocab_size": VOCABULARY})
    return VocabularyRange.for_rank(model, axis.index, axis.size)


def columns(full: Tensor, vocab_range: VocabularyRange, padding: float) -> Tensor:
    """Slice this rank's range of the last dimension of `full`, and fill its padding with `padding`."""
    part = torch.full((*full.shape[:-1], vocab_range.rows), padding, dtype=full.dtype)
    part[..., : vocab_range.valid] = full[..., vocab_range.start : vocab_range.start + vocab_range.valid]
    return part


def ids() -> Tensor:
    drawn_ids = torch.randint(VOCABULARY, (S, B), generator=torch.Generator().manual_seed(3))
    drawn_ids[:2] = torch.tensor([[0, 63, 64], [100, 63, 63]])
    return drawn_ids


def embeddings(rank: Rank, tp: int) -> dict[bool, tuple[Any, Any, Any]]:
    """Compute, without and with sequence parallelism, this rank's result, and its weight gradient by autograd and in
    `main_grad`, filled with ones before.
    """
    results = {}
    for sequence in (False, True):
        axis = axis_of(rank, tp, sequence)
        vocab_range = range_of(axis)
        weight = nn.Parameter(columns(drawn(H, VOCABULARY, seed=4), vocab_range, padding=0.0).T.contiguous())
        upstream = drawn(S, B, H, seed=5)
        if sequence:
            upstream = upstream.chunk(tp)[axis.index]
        out = vocab_parallel_embedding(ids(), weight, vocab_range, axis)
        out.backward(upstream)
        assert weight.grad is not None
        by_autograd, weight.grad = weight.grad, None
        weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
        vocab_parallel_embedding(ids(), weight, vocab_range, axis).backward(upstream)
        assert weight.grad is None
        results[sequence] = tuple(t.detach().clone().numpy() for t in (out, by_autograd, weight.main_grad))  # type: ignore[attr-defined]
    return results


@pytest.mark.parametrize("tp", SPLITS)
def test_vocab_parallel_embedding(tp: int) -> None:
    table = drawn(H, VOCABULARY, seed=4).T.contiguous().requires_grad_()
    expected = F.embedding(ids(), table)
    expected.backward(drawn(S, B, H, seed=5))
    assert table.grad is not None
    ranks = run_world(tp, embeddings, tp)
    for sequence in (False, True):
        outs, by_autograd, added = zip(*(rank[sequence] for rank in ranks), strict=True)
        if sequence:
            assert torch.equal(torch.cat([torch.from_numpy(out) for out in outs]), expected)
        else:
            assert all(torch.equal(torch.from_numpy(out), expected) for out in outs)
        for parts, before in ((by_autograd, 0), (added, 1)):
            rows = torch.cat([torch.from_numpy(part) for part in parts]) - before
            torch.testing.assert_close(rows[:VOCABULARY], table.grad, rtol=1e-13, atol=1e-14)
            assert not rows[VOCABULARY:].any(), "padding has a gradient"
