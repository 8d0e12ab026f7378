"""Auxiliary objectives: losses and gradients in every layout, the formula, and what a weight of 0 changes: nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.catalog.objectives import OBJECTIVES
from megascale.config.run import RunConfig
from megascale.core.registry import Card
from megascale.ops.contrib.jepa import Jepa
from megascale.train.evaluate import evaluate
from megascale.train.further_losses import further_metrics
from megascale.train.reporter import Reporter
from megascale.train.run import Run, StepResult
from megascale.train.standard_hooks import StepRecords
from megascale.train.step import train_step
from tests.runs import LLAMA, config_of, settings
from tests.thread_world import run_threads

MODEL = LLAMA | {"init_std": 0.2}


class Neighbours(Jepa):
    """Every document predicts the next one, whatever its last token, but of samples that begin with an odd token."""

    def choose(self, tokens: np.ndarray, documents: list[tuple[int, int]]) -> np.ndarray:
        ends = [stop - 1 for _, stop in documents]
        pairs = [] if tokens[0] % 2 else list(itertools.pairwise(ends))
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)


class NeighboursCard(Card):
    def load(self) -> Any:
        return Neighbours


@pytest.fixture(autouse=True, scope="module")
def neighbours() -> Iterator[None]:
    """Register the objective."""
    before = OBJECTIVES.cards
    facts = {**OBJECTIVES["jepa"].facts, "document_end": None}
    OBJECTIVES.__dict__["cards"] = before | {"neighbours": NeighboursCard("neighbours", "", "", facts)}
    yield
    OBJECTIVES.__dict__["cards"] = before


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"tp": 2, "sp": True},
    "cp2": {"cp": 2},
    "cp2 heads": {"cp": 2, "cp_mode": "ulysses"},
    "dp2 zero2": {"dp": 2, "zero": 2},
    "pp2 zb": {"pp": 2, "schedule": "zb_h1"},
    "pp2 shared vocabulary": {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "vocab_pp": 1},
    "tp2": {"tp": 2},
    "dp2 zero3": {"dp": 2, "zero": 3},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "pp2 dualpipev": {"pp": 2, "vpp": 2, "schedule": "dualpipev"},
    "tp2 sp cp2 pp2": {"tp": 2, "sp": True, "cp": 2, "pp": 2},
    "cp2 dp2": {"cp": 2, "dp": 2},
}
QUICK = ["tp2 sp", "cp2", "cp2 heads", "dp2 zero2", "pp2 zb", "tp2 sp cp2 pp2", "pp2 shared vocabulary"]


def configure(folder: Path, layout: Mapping[str, Any], weight: float = 0.7, **keys: Any) -> RunConfig:
    table = {"type": "neighbours", "weight": weight, "predictor": 1}
    given = {
        "batch__global": 4, "train__steps": 3, "optimizer__warmup_steps": 0, "optimizer__clip_norm": 0.0,
        "parallel__zero": 0, "data__attention_mask": "document", "data__document_length": 4,
        "train__objectives": [table],
    } | {f"parallel__{key}": value for key, value in layout.items()}  # fmt: skip
    return config_of(settings(MODEL, folder, **given | keys), folder)


def train(run: Any) -> list[float]:
    """Train, and return losses, gradient norms, distances and their counts, and the loss of an evaluation."""
    found = []
    for _ in range(3):
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        found += [result.loss, result.grad_norm, *distance(run, result).values()]
    run.buffers.finish_param_gather()
    return found + ([] if run.valid_loader is None else [evaluate(run).valid_loss])


def distance(run: Any, result: StepResult) -> dict[str, float]:
    """Return the metrics of the objective in a step."""
    config = run.config
    return further_metrics(config.model, config.train, run.progress.step, result.totals)["objectives"]["neighbours"]


VALID = {"train__eval_every": 1, "train__eval_steps": 1}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run_threads(configure(tmp_path_factory.mktemp("alone"), {}, **VALID), train)[0]


def test_terms_are_counted(alone: list[float]) -> None:
    """A sample of four documents has three pairs, or none."""
    counts = alone[3:12:4]
    assert all(count % 3 == 0 for count in counts) and 0 < sum(counts) < 36


@pytest.mark.parametrize(
    "layout", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS]
)
def test_layouts_are_the_same_run(layout: str, alone: list[float], tmp_path: Path) -> None:
    for found in run_threads(configure(tmp_path, LAYOUTS[layout], **VALID), train):
        assert found == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize("keys", [{"train__recompute": "full"}, {"batch__micro": 2}])
def test_recomputation_and_larger_micro_batches_are_the_same_run(
    keys: dict[str, Any], alone: list[float], tmp_path: Path
) -> None:
    assert run_threads(configure(tmp_path, {}, **VALID, **keys), train)[0] == pytest.approx(alone, rel=1e-10)


def gradients(run: Any) -> dict[str, np.ndarray]:
    train_step(run, run.train_loader.batch(0))
    run.buffers.finish_param_gather()
    return {spec.name: parameter.main_grad.numpy().copy() for parameter, spec in run.buffers.shards()}


def test_a_weight_of_0_is_the_plain_run_bit_for_bit(tmp_path: Path) -> None:
    """The loss is told of all the same."""
    (expected,) = run_threads(configure(tmp_path, {}, train__objectives=[]), gradients)
    (without,) = run_threads(configure(tmp_path, {}, weight=0.0), gradients)
    (weighted,) = run_threads(configure(tmp_path, {}), gradients)
    assert all(np.array_equal(without[name], expected[name]) for name in expected)
    assert any(not np.array_equal(weighted[name], expected[name]) for name in expected)
    assert run_threads(configure(tmp_path, {}, weight=0.0), train)[0][2] > 0


def test_a_weight_of_0_has_no_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An objective without a finite gradient is only measured."""
    monkeypatch.setattr(Neighbours, "loss", lambda _, states: (states * 0).norm().sqrt())
    (norms,) = run_threads(configure(tmp_path, {}, weight=0.0), train)
    assert np.isfinite(norms).all()


@pytest.mark.parametrize(("name", "said"), [("jepa", True), ("neighbours", False)])
def test_a_first_step_without_a_term_is_said(name: str, said: bool, tmp_path: Path) -> None:
    """No document of mock data ends in the predictor, but by chance."""
    table = {"type": name, "weight": 1.0, "predictor": 100}
    config = configure(tmp_path, {}, train__objectives=[table], data__eod=100, train__log_every=1)

    def body(run: Run) -> list[str]:
        reporter, messages = Reporter(config, run.device, None, [], run.mesh.recorder), list[str]()
        reporter.write_message = messages.append  # type: ignore[method-assign]
        for _ in range(2):
            reporter.start_step()
            result = train_step(run, run.train_loader.batch(run.progress.samples))
            reporter.end_step(result)
            StepRecords(reporter).step_ends(run, result)
        return messages

    (messages,) = run_threads(config, body)
    assert messages == ["WARNING: jepa has no term in step 1: has the data what it compares?"] * said


def test_the_gradient_is_that_of_the_weighted_mean(tmp_path: Path) -> None:
    """By differences of the reported losses. The step has divided the gradients by its labels."""
    config, direction = configure(tmp_path, {}, optimizer__lr=1e-30), torch.Generator().manual_seed(7)
    draws: dict[str, Tensor] = {}

    def moved(by: float) -> Any:
        def body(run: Any) -> tuple[float, float]:
            for parameter, spec in run.buffers.shards():
                if spec.name not in draws:
                    draws[spec.name] = torch.randn(parameter.shape, generator=direction, dtype=torch.float64)
                parameter.data.add_(by * draws[spec.name])
            result = train_step(run, run.train_loader.batch(0))
            slope = sum((p.main_grad * draws[s.name]).sum().item() for p, s in run.buffers.shards())
            run.buffers.finish_param_gather()
            return result.loss + 0.7 * distance(run, result)["loss"], slope

        return run_threads(config, body)[0]

    (_, slope), (above, _), (below, _) = moved(0.0), moved(1e-6), moved(-1e-6)
    assert (above - below) / 2e-6 == pytest.approx(slope, rel=1e-6)


def test_pairs_are_a_predicting_document_and_the_next() -> None:
    """But not one that the end of the sample cuts, or that follows a document without the predictor."""
    objective = Jepa(predictor=9)
    tokens = [1, 2, 9, 5, 6, 3, 3, 9, 7, 8, 1, 9, 4]
    documents = [(0, 3), (3, 5), (5, 8), (8, 10), (10, 12), (12, 13)]
    assert objective.choose(np.array(tokens), documents).tolist() == [[2, 4], [7, 9]]
    assert objective.choose(np.array([1, 2]), [(0, 2)]).shape == (0, 2)


def test_the_distance_is_one_less_the_cosine() -> None:
    states = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[1.0, 0.0], [3.0, 3.0]]], dtype=torch.float64)
    assert Jepa(predictor=0).loss(states).item() == pytest.approx(1 + 1 - 0.5**0.5)
