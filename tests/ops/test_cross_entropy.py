"""Cross-entropy of logits sharded over real ranks, and its in-place gradient, against torch's unsharded loss."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.config.backends import BackendsConfig
from megascale.config.model import ModelConfig
from megascale.core.rank import Rank
from megascale.device import detect_device
from megascale.ops import compiled
from megascale.ops import cross_entropy as module
from megascale.ops.cross_entropy import CrossEntropy, Targets
from megascale.ops.select import OpContext, build_op, select_backend
from tests.marks import only_quick_rows
from tests.model.test_vocabulary import SPLITS, VOCABULARY, B, S, axis_of, columns, drawn, range_of
from tests.runs import GPT
from tests.worlds import run_world


@dataclass(frozen=True)
class Case:
    """Logits in `dtype`, shifted by `shift`, a mask of labels, and a soft cap."""

    dtype: torch.dtype = torch.float64
    shift: float = 0.0
    spread: float = 3.0
    mask: str = "none"
    cap: float | None = None

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
        """Include the edges of every rank's range. Masked labels may be invalid tokens."""
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
    "capped": Case(mask="weighted", cap=4.0),
    "far above the cap": Case(spread=400.0, cap=30.0),
    "capped fp32": Case(dtype=torch.float32, mask="some", cap=4.0),
    "capped bf16": Case(dtype=torch.bfloat16, mask="some", cap=4.0),
}


def backend(name: str, cap: float | None) -> CrossEntropy:
    """Build a backend; `fused`: the functions compiled by `compile`, run eagerly."""
    if name == "fused":
        return CrossEntropy(compiled.fused_statistics, compiled.fused_gradient, cap)
    backends = BackendsConfig(cross_entropy=name)
    model = ModelConfig.model_validate(GPT | {"logit_softcap": cap})
    return build_op("cross_entropy", OpContext(model, backends, torch.float32, detect_device(allow_gpu=False)))


def losses(
    rank: Rank, tp: int, backend_name: str, block_bytes: int
) -> tuple[tuple[int, int], dict[str, tuple[Any, ...]]]:
    """Return this rank's range, and by case loss, loss without gradient, dtype, and gradient of its logits."""
    module.BLOCK_BYTES = block_bytes
    axis = axis_of(rank, tp)
    shard = range_of(axis)
    results = {}
    for name, case in CASES.items():
        cross_entropy, wide = backend(backend_name, case.cap), torch.promote_types(case.dtype, torch.float32)
        weights = case.weights()
        weights = torch.ones(S * B, dtype=wide) if weights is None else weights.flatten().to(wide)
        targets = Targets(case.labels().flatten() - shard.start, weights, shard.valid)
        logits = columns(case.logits(), shard, padding=1e4).flatten(0, 1)
        reduce = partial(all_reduce, axis.group)
        loss_only, none = cross_entropy(logits.clone(), targets, reduce, False)
        assert none is None
        loss, grad = cross_entropy(logits, targets, reduce, True)
        assert grad is not None and grad.data_ptr() == logits.data_ptr() and grad.dtype == case.dtype
        results[name] = (loss.item(), loss_only.item(), str(loss.dtype), grad.unflatten(0, (S, B)).double().numpy())
    return (shard.start, shard.valid), results


@cache
def ranks_of(tp: int, backend: str = "torch", block_bytes: int = 1 << 20) -> list[Any]:
    return run_world(tp, losses, tp, backend, block_bytes)


BACKENDS = only_quick_rows(
    [*itertools.product(SPLITS, ("torch", "fused")), (2, "compile")],
    *((tp, "torch") for tp in SPLITS), (4, "fused"),
)  # fmt: skip


@pytest.mark.parametrize(("tp", "backend"), BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_torchs(name: str, tp: int, backend: str) -> None:
    case = CASES[name]
    raw = case.logits().double().requires_grad_()
    logits = raw if case.cap is None else case.cap * torch.tanh(raw / case.cap)
    weights, labels = case.weights(), case.labels()
    if weights is None:
        expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    else:
        labels = labels.masked_fill(weights == 0, -100)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        expected = (losses * weights.flatten()).sum()
    expected.backward()
    assert raw.grad is not None

    ranges = [shard for shard, _ in ranks_of(tp, backend)]
    results = [results[name] for _, results in ranks_of(tp, backend)]
    total = {loss for loss, *_ in results}
    assert len(total) == 1, "ranks disagree"
    assert all(loss_only == loss for loss, loss_only, *_ in results)
    wide = "torch.float64" if case.dtype == torch.float64 else "torch.float32"
    assert {dtype for _, _, dtype, _ in results} == {wide}
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-6}[case.dtype]
    assert abs(total.pop() - expected.item()) <= tolerance * max(abs(expected.item()), 1)

    gradient = torch.cat(
        [torch.from_numpy(g[..., :valid]) for (_, valid), (*_, g) in zip(ranges, results, strict=True)], -1
    )
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.01 * 2.0**-8}[case.dtype]
    torch.testing.assert_close(gradient, raw.grad, rtol=rounding, atol=1e-3 * tolerance)
    for (_, valid), (*_, g) in zip(ranges, results, strict=True):
        assert not g[..., valid:].any(), "padding has a gradient"


def test_shards_include_partial_and_empty_ranges() -> None:
    assert [shard for shard, _ in ranks_of(1)] == [(0, 101)]
    assert [shard for shard, _ in ranks_of(2)] == [(0, 64), (64, 37)]
    assert [shard for shard, _ in ranks_of(4)] == [(0, 64), (64, 37), (128, 0), (192, 0)]


def test_blocks_change_nothing() -> None:
    """Blocks of one row, three rows, and all rows give bit-equal results."""
    for (_, unblocked), *blocked in zip(
        *(ranks_of(2, "torch", size) for size in (1 << 20, 1, 3 * 64 * 8)), strict=True
    ):
        for _, blocks in blocked:
            for name in CASES:
                assert blocks[name][:3] == unblocked[name][:3]
                assert (blocks[name][3] == unblocked[name][3]).all()


def test_a_cpu_selects_torch() -> None:
    context = OpContext(
        ModelConfig.model_validate(GPT), BackendsConfig(), torch.float32, detect_device(allow_gpu=False)
    )
    choice = select_backend("cross_entropy", context)
    assert (choice.backend, list(choice.rejected)) == ("torch", ["triton", "compile"])
