"""Token embedding and cross-entropy over a vocabulary that is cut over real ranks, against torch's on the whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megascale.comm.group import alone
from megascale.comm.mesh import open_mesh
from megascale.config.model import ModelConfig
from megascale.core.rank import Rank
from megascale.layout.tensors import padded_vocab
from megascale.layout.topology import Topology
from megascale.parallel.overlap import TensorAxis
from megascale.parallel.vocabulary import VocabularyRange, cross_entropy_sum, embed
from tests.runs import GPT
from tests.worlds import run_world

VOCABULARY, S, B, H = 101, 8, 3, 6
"""With tp = 4 a rank has 64 rows: the first is full, the second has 37 tokens, two hold nothing but padding."""

SPLITS = [1, 2, 4]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """Logits in `dtype`, all moved by `shift`, and how the labels count."""

    dtype: torch.dtype = torch.float64
    shift: float = 0.0
    spread: float = 3.0
    mask: str = "none"

    def logits(self) -> Tensor:
        return (self.spread * drawn(S, B, VOCABULARY, seed=0) + self.shift).to(self.dtype)

    def weights(self) -> Tensor | None:
        ones = torch.ones(S, B, dtype=torch.int64)
        if self.mask == "some":
            ones[2:5, 1] = 0
        if self.mask == "weighted":
            return drawn(S, B, seed=2).abs()
        return {"none": None, "some": ones, "nothing": 0 * ones}[self.mask]

    def labels(self) -> Tensor:
        """The edges of every rank's range are among them; what is masked may be no token at all."""
        labels = torch.randint(VOCABULARY, (S, B), generator=torch.Generator().manual_seed(1))
        labels[:2] = torch.tensor([[0, 63, 64], [100, 50, 51]])
        if self.mask == "some":
            labels[2:5, 1] = torch.tensor([-100, -1, 10**6])
        return labels


CASES = {
    "plain": Case(),
    "mask": Case(mask="some"),
    "weighted": Case(mask="weighted"),
    "all masked": Case(mask="nothing"),
    "far from zero": Case(shift=5e4),
    "certain": Case(spread=400.0),
    "fp32": Case(dtype=torch.float32, mask="some"),
    "bf16": Case(dtype=torch.bfloat16, mask="some"),
}


def axis_of(rank: Rank, tp: int, sequence: bool = False) -> TensorAxis:
    if tp == 1:
        return TensorAxis(alone("tp"), sequence)
    return TensorAxis(open_mesh(Topology(tp=tp), rank.rank, tied=False).tp, sequence)


def range_of(axis: TensorAxis) -> VocabularyRange:
    model = ModelConfig.model_validate(GPT | {"vocab_size": VOCABULARY})
    return VocabularyRange.of(VOCABULARY, padded_vocab(model, axis.size), axis)


def columns(full: Tensor, own: VocabularyRange, padding: float) -> Tensor:
    """This rank's part of the last dimension of `full`, and `padding` in what is left of its rows."""
    part = torch.full((*full.shape[:-1], own.rows), padding, dtype=full.dtype)
    part[..., : own.valid] = full[..., own.start : own.start + own.valid]
    return part


def cross_entropies(rank: Rank, tp: int) -> tuple[tuple[int, int], dict[str, tuple[float, Any, Any]]]:
    """This rank's range, and for each case the loss, its dtype and the gradient of this rank's logits."""
    axis = axis_of(rank, tp)
    own = range_of(axis)
    found = {}
    for name, case in CASES.items():
        logits = columns(case.logits(), own, padding=1e4).requires_grad_()
        loss = cross_entropy_sum(logits * 1, case.labels(), case.weights(), own, axis)
        (loss * 0.5).backward()
        assert logits.grad is not None and logits.grad.dtype == case.dtype
        found[name] = (loss.item(), str(loss.dtype), logits.grad.double().numpy())
    return (own.start, own.valid), found


@cache
def ranks_of(tp: int) -> list[Any]:
    return run_world(tp, cross_entropies, tp)


@pytest.mark.parametrize("tp", SPLITS)
@pytest.mark.parametrize("name", CASES)
def test_cross_entropy_sum(name: str, tp: int) -> None:
    case = CASES[name]
    logits = case.logits().double().requires_grad_()
    weights, labels = case.weights(), case.labels()
    if weights is None:
        expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    else:
        labels = labels.masked_fill(weights == 0, -100)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        expected = (losses * weights.flatten()).sum()
    (expected * 0.5).backward()
    assert logits.grad is not None

    ranges = [own for own, _ in ranks_of(tp)]
    results = [results[name] for _, results in ranks_of(tp)]
    losses_found = {loss for loss, _, _ in results}
    assert len(losses_found) == 1, "ranks disagree"
    wide = "torch.float64" if case.dtype == torch.float64 else "torch.float32"
    assert {dtype for _, dtype, _ in results} == {wide}
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-6}[case.dtype]
    assert abs(losses_found.pop() - expected.item()) <= tolerance * max(abs(expected.item()), 1)

    gradient = torch.cat(
        [torch.from_numpy(g[..., :valid]) for (_, valid), (_, _, g) in zip(ranges, results, strict=True)], -1
    )
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.01 * 2.0**-8}[case.dtype]
    torch.testing.assert_close(gradient, logits.grad, rtol=rounding, atol=1e-3 * tolerance)
    for (_, valid), (_, _, g) in zip(ranges, results, strict=True):
        assert not g[..., valid:].any(), "padding has a gradient"


def test_the_ranges_are_what_the_cases_are_about() -> None:
    assert [own for own, _ in ranks_of(1)] == [(0, 101)]
    assert [own for own, _ in ranks_of(2)] == [(0, 64), (64, 37)]
    assert [own for own, _ in ranks_of(4)] == [(0, 64), (64, 37), (128, 0), (192, 0)]


def ids() -> Tensor:
    drawn_ids = torch.randint(VOCABULARY, (S, B), generator=torch.Generator().manual_seed(3))
    drawn_ids[:2] = torch.tensor([[0, 63, 64], [100, 63, 63]])
    return drawn_ids


def embeddings(rank: Rank, tp: int) -> dict[bool, tuple[Any, Any, Any]]:
    """Without and with sequence parallelism: this rank's result, its weight's gradient from autograd, and in
    `main_grad`, where ones stood before.
    """
    found = {}
    for sequence in (False, True):
        axis = axis_of(rank, tp, sequence)
        own = range_of(axis)
        weight = nn.Parameter(columns(drawn(H, VOCABULARY, seed=4), own, padding=0.0).T.contiguous())
        upstream = drawn(S, B, H, seed=5)
        if sequence:
            upstream = upstream.chunk(tp)[axis.index]
        out = embed(ids(), weight, own, axis)
        out.backward(upstream)
        assert weight.grad is not None
        by_autograd, weight.grad = weight.grad, None
        weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
        embed(ids(), weight, own, axis).backward(upstream)
        assert weight.grad is None
        found[sequence] = tuple(t.detach().clone().numpy() for t in (out, by_autograd, weight.main_grad))  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("tp", SPLITS)
def test_embed(tp: int) -> None:
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
