"""Ranks that share sequences are the same run as one process: loss, gradient norm, evaluation and weights, in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.config.run import RunConfig
from megascale.train.evaluate import evaluate
from megascale.train.step import train_step
from tests.marks import only_quick
from tests.runs import MODELS, config_of, settings
from tests.thread_world import run_threads

STEPS = 2


def layout(**keys: Any) -> dict[str, Any]:
    return {f"parallel__{key}": value for key, value in keys.items()}


ULYSSES, GATHER, RING = ({"cp_mode": mode} for mode in ("ulysses", "allgather", "ring"))
USP = {"cp_mode": "usp", "cp_a2a_size": 2}
LAYOUTS = {
    "ulysses 2": layout(cp=2, **ULYSSES),
    "ulysses 4": layout(cp=4, **ULYSSES),
    "allgather 2": layout(cp=2, **GATHER),
    "allgather 3": layout(cp=3, **GATHER),
    "ring 2": layout(cp=2, **RING),
    "ring 3": layout(cp=3, **RING),
    "ring 4": layout(cp=4, **RING),
    "usp 2x2": layout(cp=4, **USP),
    "usp 2x3": layout(cp=6, **USP),
    "ulysses 2, tp2 sp": layout(cp=2, tp=2, sp=True, **ULYSSES),
    "allgather 2, dp2 zero2": layout(cp=2, dp=2, zero=2, **GATHER),
    "ring 2, tp2": layout(cp=2, tp=2, **RING),
    "ring 2, tp2 sp pp2": layout(cp=2, tp=2, sp=True, pp=2, **RING),
    "ring 2, pp2 vpp2 dp2": layout(cp=2, pp=2, vpp=2, dp=2, **RING),
    "ring 3, gpipe zero0": layout(cp=3, pp=2, schedule="gpipe", zero=0, **RING),
    "usp 2x2, pp2 zero2": layout(cp=4, pp=2, zero=2, **USP),
}


@dataclass(frozen=True)
class Case:
    """A model, and other keys of the run."""

    family: str
    keys: dict[str, Any]


PACKED = {"data__attention_mask": "document", "data__document_length": 7}
CASES = {
    "gpt": Case("gpt", {}),
    "llama": Case("llama", {}),
    "gpt, windows, parallel block": Case("gpt", {"model__window": [5, 0, 9], "model__block": "parallel"}),
    "llama, packed, window, recomputed": Case("llama", PACKED | {"model__window": 4, "train__recompute": "full"}),
    "gpt, packed, micro-batches of 2": Case("gpt", PACKED | {"batch__micro": 2}),
    "llama, recomputed attention, scale": Case(
        "llama", {"train__recompute": "selective", "model__softmax_scale": 0.3, "model__qk_norm": "head"}
    ),
}
LINEAR = "llama, packed, linear attention"
CASES[LINEAR] = Case("llama", PACKED | {"model__attention_pattern": "LLS"})
LATENT = "mla, packed"
CASES[LATENT] = Case("mla", PACKED)
MUON = "llama, Muon, z-loss, averaged weights"
CASES[MUON] = Case(
    "llama",
    {
        "optimizer__name": "muon", "optimizer__options": {"ns_dtype": "fp64"}, "train__z_loss": 1e-3,
        "train__weight_average": "ema",
    },
)  # fmt: skip
BY_DOCUMENT = "llama, packed, shards by document, recomputed"
CASES[BY_DOCUMENT] = Case(
    "llama",
    {"data__attention_mask": "document", "data__document_length": 11, "train__recompute": "full"}
    | layout(cp_sharding="document"),
)
QUICK = {
    "ulysses 4": "llama, packed, window, recomputed",
    "allgather 3": "gpt, windows, parallel block",
    "ring 2, tp2 sp pp2": BY_DOCUMENT,
    "usp 2x2": "gpt, packed, micro-batches of 2",
    "allgather 2, dp2 zero2": MUON,
    "ulysses 2, tp2 sp": LATENT,
}


@dataclass(frozen=True)
class Outcome:
    """The totals of every step, an evaluation after them, and this rank's parts of weights and state."""

    steps: list[dict[str, float]]
    evaluation: tuple[float, int]
    parts: list[tuple[str, tuple[int, ...], tuple[slice, ...], Tensor]]


def configure(case: Case, folder: Path, **keys: Any) -> RunConfig:
    small: dict[str, Any] = {
        "model__num_layers": 3, "model__seq_length": 24, "batch__global": 4, "optimizer__lr": 1e-3,
        "optimizer__warmup_steps": 0, "train__steps": STEPS, "train__eval_every": STEPS, "train__eval_steps": 1,
    }  # fmt: skip
    model: Any = MODELS[case.family]
    return config_of(settings(model, folder, **(small | case.keys | keys)), folder)


def train(run: Any) -> Outcome:
    steps = []
    for _ in range(STEPS):
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        steps.append({name: total for name, total in result.totals.items() if name != "local_loss"})
    run.buffers.finish_param_gather()
    evaluation = evaluate(run)
    parts = []
    for name, tensor in run.optimizer.global_tensors().items():
        for shard in tensor.shards:
            place = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.size, strict=True))
            parts.append((name, tuple(tensor.shape), place, shard.data.view(shard.size).clone()))
    return Outcome(steps, (evaluation.valid_loss, evaluation.valid_tokens), parts)


def joined(outcomes: list[Outcome]) -> dict[str, Tensor]:
    """Weights and state, from the parts of all ranks."""
    whole: dict[str, Tensor] = {}
    for name, shape, place, part in (part for outcome in outcomes for part in outcome.parts):
        whole.setdefault(name, torch.full(shape, float("nan"), dtype=torch.float64))[place] = part
    return whole


ALONE: dict[str, Outcome] = {}


def check(case: str, keys: dict[str, Any], folder: Path) -> None:
    """Check that a run with these keys is the run of one process."""
    config = configure(CASES[case], folder, **keys)
    if case not in ALONE:
        (ALONE[case],) = run_threads(configure(CASES[case], folder), train)
    check_equal(run_threads(config, train), ALONE[case])


def check_equal(ranks: list[Outcome], alone: Outcome) -> None:
    """Check that the ranks of a job have had the run of one process."""
    assert all(outcome.steps == ranks[0].steps for outcome in ranks), "ranks disagree about the same sums"
    for step, expected_step in zip(ranks[0].steps, alone.steps, strict=True):
        assert step == pytest.approx(expected_step, rel=1e-10)  # counts of tokens and of scores, too
    assert ranks[0].evaluation == (pytest.approx(alone.evaluation[0], rel=1e-10), alone.evaluation[1])
    mine, expected = joined(ranks), joined([alone])
    assert mine.keys() == expected.keys()
    for key, whole in expected.items():
        torch.testing.assert_close(mine[key], whole, rtol=1e-8, atol=1e-10 * float(whole.abs().max()) + 1e-14)


@pytest.mark.parametrize(("name", "case"), QUICK.items())
def test_sharing_sequences_does_not_change_a_run(name: str, case: str, tmp_path: Path) -> None:
    check(case, LAYOUTS[name], tmp_path)


def test_overlap_of_a_ring_changes_no_bit(tmp_path: Path) -> None:
    on, off = (
        run_threads(configure(CASES[BY_DOCUMENT], tmp_path, **LAYOUTS["ring 2, tp2"], overlap__cp=overlap), train)
        for overlap in (True, False)
    )
    for mine, theirs in zip(on, off, strict=True):
        assert (mine.steps, mine.evaluation) == (theirs.steps, theirs.evaluation)
        for (*place, tensor), (*other_place, other) in zip(mine.parts, theirs.parts, strict=True):
            assert place == other_place and torch.equal(tensor, other)


ALL = [(name, case) for name in LAYOUTS for case in CASES if not (case == BY_DOCUMENT and name.startswith("ulysses"))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), ALL)
def test_no_way_of_sharing_sequences_changes_a_run(name: str, case: str, tmp_path: Path) -> None:
    check(case, LAYOUTS[name], tmp_path)


FP8 = {
    "model__hidden_size": 64, "model__num_kv_heads": 4, "model__ffn_size": 64, "model__seq_length": 64,
    "train__precision": "fp8",
}  # fmt: skip
PRECISIONS: dict[str, tuple[dict[str, Any], float, float]] = {
    "fp32": ({"train__precision": "fp32", "batch__rampup": [2, 2, 2]}, 1e-5, 1e-4),
    "bf16": ({"train__precision": "bf16"}, 2e-3, 2e-2),
    "fp8": (FP8 | {"fp8__recipe": "tensorwise"}, 2e-3, 5e-2),
    "fp8 of rows": (FP8 | {"fp8__recipe": "rowwise"}, 2e-3, 5e-2),
    "fp8, delayed": (FP8 | {"fp8__recipe": "delayed", "train__recompute": "full"}, 2e-3, 5e-2),
}
"""Keys of the run, and how far losses and gradient norms are from one process's, by rounding."""


@pytest.mark.parametrize("precision", only_quick(PRECISIONS, "fp8"))
@pytest.mark.parametrize(
    "name", only_quick(["ring 2, tp2", "ulysses 2, tp2 sp", "allgather 2, dp2 zero2", "usp 2x2"], "usp 2x2")
)
def test_runs_in_few_bits_are_those_of_one_process(name: str, precision: str, tmp_path: Path) -> None:
    keys, loss, norm = PRECISIONS[precision]
    case = Case("llama", keys)
    (alone,) = run_threads(configure(case, tmp_path), train)
    for outcome in run_threads(configure(case, tmp_path, **LAYOUTS[name]), train):
        for step, expected in zip(outcome.steps, alone.steps, strict=True):
            assert {**step, "grad_norm": expected["grad_norm"]} == pytest.approx(expected, rel=loss)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=norm)
        assert outcome.evaluation == (pytest.approx(alone.evaluation[0], rel=loss), alone.evaluation[1])
