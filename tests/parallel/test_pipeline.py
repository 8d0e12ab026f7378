"""The executor: any number of micro-batches, no more alive than the schedule claims, tied embeddings summed once."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megascale.catalog.schedules import SCHEDULES
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.parallel.pipeline import Pipeline
from megascale.schedule import ir
from megascale.trace.recorder import Recorder
from tests.runs import (
    GPT,
    build_run,
    builds,
    config_of,
    curve_of,
    scale_and_clip,
    send_messages,
    settings,
    train_curve,
)
from tests.schedule.units import simulate
from tests.worlds import run_world

Layout = dict[str, Any]

LAYOUTS: dict[str, tuple[int, Layout]] = {  # ranks, layout
    "pp2": (2, {"parallel__pp": 2}),
    "pp2 gpipe": (2, {"parallel__pp": 2, "parallel__schedule": "gpipe"}),
    "pp2 vpp2": (2, {"parallel__pp": 2, "parallel__vpp": 2}),
    "pp2 vpp2 zero2 no overlap": (
        2,
        {"parallel__pp": 2, "parallel__vpp": 2, "parallel__zero": 2, "overlap__pp": False},
    ),
    "pp4": (4, {"parallel__pp": 4}),
    "pp4 interleaved": (4, {"parallel__pp": 4, "parallel__schedule": "interleaved_1f1b"}),
}
COUNTS = (1, 3, 5)
"""Micro-batches: one, and numbers that no count of stages divides."""


class _Alive(torch.autograd.Function):
    """Does nothing, and lives as long as the graph of its micro-batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Any) -> Tensor:
        ctx.token = token
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Token:
    """Something that a graph may hold."""


class Watched(nn.Module):
    """A stage whose graphs are counted. `alive`: tokens held by all stages of the rank, `peak` the most at once."""

    def __init__(self, stage: nn.Module, counts: dict[str, int]) -> None:
        super().__init__()
        self._stage = stage
        self._counts = counts

    def forward(self, x: Tensor | None, batch: Any) -> Tensor:
        out = self._stage(x, batch)
        if not torch.is_grad_enabled():
            return out
        token, counts = Token(), self._counts
        counts["alive"] += 1
        counts["peak"] = max(counts["peak"], counts["alive"])
        weakref.finalize(token, lambda: counts.update(alive=counts["alive"] - 1))
        return _Alive.apply(out, token)


def executed(rank: Rank, configs: list[RunConfig]) -> list[dict[str, Any]]:
    """For each run: loss, norm and the embedding's gradient of a first step, and how many micro-batches were alive."""
    found = []
    for run in builds(rank, configs):
        counts = {"alive": 0, "peak": 0}
        run.pipeline.stages = [Watched(stage, counts) for stage in run.stages]
        run.gradients.clear()
        loss = float(run.pipeline.run(run.train_order, run.train.batch(0)))
        list(run.gradients.finish())
        found.append({"loss": loss, **counts, "embedding": embedding_gradient(run)})
        found[-1]["norm"] = scale_and_clip(run)
    return found


def embedding_gradient(run: Any) -> np.ndarray | None:
    """This rank's copy of the token embedding's gradient; its world has one data-parallel rank."""
    for bucket in run.gradients.buckets:
        for slot in bucket.layout.slots:
            if slot.parameter.name == "embedding.token.weight":
                return bucket.grad[slot.start : slot.stop].numpy().copy()
    return None


def configurations(folder: Path, layout: Layout) -> list[RunConfig]:
    return [config_of(settings(GPT, folder, batch__global=m, **layout), folder) for m in COUNTS]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same steps in one process."""
    return run_world(1, executed, configurations(tmp_path_factory.mktemp("alone"), {}))[0]


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[RunConfig], list[Any]]:
    """The steps of every count in one layout: configurations, and what each rank found for each of them."""
    world, layout = LAYOUTS[request.param]
    configs = configurations(tmp_path_factory.mktemp("layout"), layout)
    return configs, run_world(world, executed, configs)


def test_any_number_of_micro_batches_is_the_same_step(ranks: Any, alone: Any) -> None:
    configs, found = ranks
    for index, expected in enumerate(alone):
        losses = [rank[index]["loss"] for rank in found]
        assert losses[:-1] == [0.0] * (len(losses) - 1), "losses are formed on the last stage's rank alone"
        assert losses[-1] == pytest.approx(expected["loss"], rel=1e-12), configs[index].batch
        assert all(rank[index]["norm"] == pytest.approx(expected["norm"], rel=1e-10) for rank in found)


def test_no_more_is_alive_than_the_schedule_claims(ranks: Any) -> None:
    configs, found = ranks
    for index, config in enumerate(configs):
        p = config.parallel
        claimed = simulate(ir.schedule(SCHEDULES[p.schedule].load(), p.pp, p.vpp, config.micro_batches), p.vpp).live
        assert tuple(rank[index]["peak"] for rank in found) == claimed
        assert all(rank[index]["alive"] == 0 for rank in found), "nothing outlives the step"


def test_tied_embeddings_have_the_sum_of_both_ends_once(ranks: Any, alone: Any) -> None:
    _, found = ranks
    for index, expected in enumerate(alone):
        held = [rank[index]["embedding"] for rank in found]
        assert [gradient is None for gradient in held] == [False, *[True] * (len(held) - 2), False]
        for gradient in (held[0], held[-1]):
            np.testing.assert_allclose(gradient, expected["embedding"], rtol=1e-10, atol=1e-12)


def evaluated(rank: Rank, config: RunConfig) -> tuple[float, int]:
    """The loss of a batch without backwards, and the graphs that this made."""
    run = build_run(rank, config)
    counts = {"alive": 0, "peak": 0}
    run.pipeline.stages = [Watched(stage, counts) for stage in run.stages]
    kept: list[bool] = []
    for stage in run.stages:
        stage.register_forward_hook(lambda module, x, out: kept.append(out.requires_grad))
    loss = float(run.pipeline.run(run.valid_order, run.train.batch(0)))
    assert len(kept) == config.micro_batches * config.parallel.vpp
    return loss, sum(kept)


def test_an_evaluation_keeps_nothing_for_a_backward(alone: Any, tmp_path: Path) -> None:
    config = config_of(settings(GPT, tmp_path, batch__global=3, parallel__pp=2, parallel__vpp=2), tmp_path)
    first, last = run_world(2, evaluated, config)
    assert first == (0.0, 0)
    assert last == (pytest.approx(alone[COUNTS.index(3)]["loss"], rel=1e-12), 0)


class Sending:
    """A message that is gone when the test says so."""

    gone = False

    def done(self) -> bool:
        return self.gone


def test_what_has_gone_is_let_go_of_whatever_has_left_before_it() -> None:
    upwards, downwards = Sending(), Sending()
    leaving = iter((upwards, downwards))
    channels = SimpleNamespace(send=lambda tensor, target, what: next(leaving))
    nothing: Any = SimpleNamespace(channels=channels, recorder=Recorder())
    pipeline = Pipeline([], nothing, nothing, nothing, torch.float32)
    tensors = [torch.zeros(1), torch.zeros(1)]
    there = [weakref.ref(tensor) for tensor in tensors]
    for target, tensor in enumerate(tensors):
        pipeline.send(tensor, target, "")
    del tensors, tensor
    downwards.gone = True
    pipeline.release()
    assert there[0]() is not None and there[1]() is None


def by_backend(rank: Rank, config: RunConfig) -> list[tuple[float, float]]:
    run = build_run(rank, config)
    send_messages(run.mesh.tp, backend=True)
    return curve_of(run, 2)


def test_a_boundary_is_put_together_by_the_backends_own_collectives_too(tmp_path: Path) -> None:
    """As in groups of more ranks than share memory or send each other messages."""
    config = config_of(settings(GPT, tmp_path, parallel__tp=2, parallel__pp=2), tmp_path)
    found, expected = run_world(4, by_backend, config)[0], run_world(4, train_curve, config)[0]
    np.testing.assert_allclose(found, expected[:2], rtol=1e-10)
