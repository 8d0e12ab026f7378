"""Pipeline executor: any number of micro-batches, live micro-batches of the schedule, tied embeddings summed once."""

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
from megascale.layout.stages import looped
from megascale.parallel.microbatch import StageOutput
from megascale.parallel.pipeline import PipelineExecutor
from megascale.record.label import Label
from megascale.record.recorder import Recorder
from megascale.schedule.ir import build_schedule
from tests.marks import only_quick
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
    train_order,
    valid_order,
)
from tests.schedule.units import simulate_schedule
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
QUICK = ("pp2 gpipe", "pp2 vpp2", "pp2 vpp2 zero2 no overlap", "pp4")
COUNTS = (1, 3, 5)
"""Numbers of micro-batches: 1, and numbers that the number of stages does not divide."""


class _Alive(torch.autograd.Function):
    """The identity; its context lives as long as the graph of its micro-batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Any) -> Tensor:
        ctx.token = token
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Token:
    """An object for a graph to hold."""


class Watched(nn.Module):
    """A stage that counts live graphs. `alive`: the objects held by all stages of the rank; `peak`: the maximum."""

    def __init__(self, stage: nn.Module, counts: dict[str, int]) -> None:
        super().__init__()
        self._stage = stage
        self._counts = counts

    def forward(self, x: Tensor | None, batch: Any) -> StageOutput:
        out = self._stage(x, batch)
        if not torch.is_grad_enabled():
            return out
        token, counts = Token(), self._counts
        counts["alive"] += 1
        counts["peak"] = max(counts["peak"], counts["alive"])
        weakref.finalize(token, lambda: counts.update(alive=counts["alive"] - 1))
        if out.activation is not None:
            return StageOutput(_Alive.apply(out.activation, token))
        return StageOutput(None, _Alive.apply(out.loss, token))


def executed(rank: Rank, configs: list[RunConfig]) -> list[dict[str, Any]]:
    """Run a first step of every run: loss, norm, the embedding's gradient, and the number of live micro-batches."""
    results = []
    for run in builds(rank, configs):
        counts = {"alive": 0, "peak": 0}
        run.pipeline.stages = [Watched(stage, counts) for stage in run.stages]
        run.buffers.begin_step()
        loss = float(run.pipeline.run_actions(train_order(run), run.train_loader.batch(0)))
        list(run.buffers.finish_reductions())
        results.append({"loss": loss, **counts, "embedding": embedding_gradient(run)})
        results[-1]["norm"] = scale_and_clip(run)
    return results


def embedding_gradient(run: Any) -> np.ndarray | None:
    """Return this rank's copy of the token embedding's gradient, for dp = 1."""
    for bucket in run.buffers.buckets:
        for slot in bucket.layout.slots:
            if slot.parameter.name == "embedding.token.weight":
                return bucket.grad[slot.start : slot.stop].numpy().copy()
    return None


def configurations(folder: Path, layout: Layout) -> list[RunConfig]:
    return [config_of(settings(GPT, folder, batch__global=m, **layout), folder) for m in COUNTS]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run the same steps in one process."""
    return run_world(1, executed, configurations(tmp_path_factory.mktemp("alone"), {}))[0]


@pytest.fixture(scope="module", params=only_quick(LAYOUTS, *QUICK))
def ranks(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[RunConfig], list[Any]]:
    """Run a step per number of micro-batches in one layout: configurations, and the results by rank."""
    world, layout = LAYOUTS[request.param]
    configs = configurations(tmp_path_factory.mktemp("layout"), layout)
    return configs, run_world(world, executed, configs)


def test_any_number_of_micro_batches_is_the_same_step(ranks: Any, alone: Any) -> None:
    configs, results = ranks
    for index, expected in enumerate(alone):
        losses = [rank[index]["loss"] for rank in results]
        assert losses[:-1] == [0.0] * (len(losses) - 1), "ranks without the last stage have a loss"
        assert losses[-1] == pytest.approx(expected["loss"], rel=1e-12), configs[index].batch
        assert all(rank[index]["norm"] == pytest.approx(expected["norm"], rel=1e-10) for rank in results)


def test_live_micro_batches_are_those_of_the_schedule(ranks: Any) -> None:
    configs, results = ranks
    for index, config in enumerate(configs):
        p = config.parallel
        order = build_schedule(SCHEDULES[p.schedule].load(), p.pp, p.vpp, config.num_microbatches)
        claimed = simulate_schedule(order, looped(p.pp, p.vpp)).max_live
        assert tuple(rank[index]["peak"] for rank in results) == claimed
        assert all(rank[index]["alive"] == 0 for rank in results), "a graph outlives the step"


def test_tied_embeddings_have_the_sum_of_both_stages(ranks: Any, alone: Any) -> None:
    _, results = ranks
    for index, expected in enumerate(alone):
        held = [rank[index]["embedding"] for rank in results]
        assert [gradient is None for gradient in held] == [False, *[True] * (len(held) - 2), False]
        for gradient in (held[0], held[-1]):
            np.testing.assert_allclose(gradient, expected["embedding"], rtol=1e-10, atol=1e-12)


def roots_of(out: StageOutput) -> list[Tensor]:
    return [root for root in (out.activation, out.loss) if root is not None]


def evaluated(rank: Rank, config: RunConfig) -> tuple[float, int]:
    """Evaluate a batch: its loss, and the graphs created."""
    run = build_run(rank, config)
    counts = {"alive": 0, "peak": 0}
    run.pipeline.stages = [Watched(stage, counts) for stage in run.stages]
    requires_grad: list[bool] = []
    for stage in run.stages:
        stage.register_forward_hook(
            lambda module, x, out: requires_grad.append(any(root.requires_grad for root in roots_of(out)))
        )
    loss = float(run.pipeline.run_actions(valid_order(run), run.train_loader.batch(0)))
    assert len(requires_grad) == config.num_microbatches * config.parallel.vpp
    return loss, sum(requires_grad)


def test_an_evaluation_saves_nothing_for_backward(alone: Any, tmp_path: Path) -> None:
    config = config_of(settings(GPT, tmp_path, batch__global=3, parallel__pp=2, parallel__vpp=2), tmp_path)
    first, last = run_world(2, evaluated, config)
    assert first == (0.0, 0)
    assert last == (pytest.approx(alone[COUNTS.index(3)]["loss"], rel=1e-12), 0)


class Penalized(nn.Module):
    """A stage that adds the sum of its activation's squares to the loss."""

    def __init__(self, stage: nn.Module, constant: float) -> None:
        super().__init__()
        self._stage = stage
        self._constant = constant

    def forward(self, x: Tensor | None, batch: Any) -> StageOutput:
        out = self._stage(x, batch)
        if out.activation is None:
            return out
        return out._replace(loss=self._constant * out.activation.square().sum())


def penalized(rank: Rank, config: RunConfig) -> list[tuple[float, Any]]:
    """The loss and the gradients of this rank, by the constant of the term."""
    found = []
    for constant in (0.0, 0.25, 0.5):
        run = build_run(rank, config)
        run.pipeline.stages = [Penalized(stage, constant) for stage in run.stages]
        run.buffers.begin_step()
        loss = float(run.pipeline.run_actions(train_order(run), run.train_loader.batch(0)))
        grads = [bucket.grad.clone() for bucket in run.buffers.finish_reductions()]
        found.append((loss, torch.cat(grads).numpy()))
    return found


def test_any_stage_adds_a_term_to_the_loss(tmp_path: Path) -> None:
    config = config_of(settings(GPT, tmp_path, batch__global=2, parallel__pp=2, train__precision="fp64"), tmp_path)
    first, last = run_world(2, penalized, config)
    (without, plain), (once, quarter), (twice, half) = first
    assert without == 0.0 and once > 0 and twice == pytest.approx(2 * once, rel=1e-12)
    assert np.abs(quarter - plain).max() > 1e-3
    np.testing.assert_allclose(half - plain, 2 * (quarter - plain), rtol=1e-9, atol=1e-12)
    assert len({loss for loss, _ in last}) == 1, "the last stage adds the cross-entropy alone"


class Sending:
    """A send that completes when the test says so, or when it is waited for."""

    completed = False

    def is_completed(self) -> bool:
        return self.completed

    def wait(self) -> None:
        self.completed = True


def mesh_of(*sends: Sending) -> Any:
    left = iter(sends)
    p2p = SimpleNamespace(send=lambda tensor, target, label: next(left), size=2, rank=0)
    return SimpleNamespace(p2p=p2p, recorder=Recorder(), placement=looped(2, 1))


@pytest.mark.parametrize("overlap", [True, False])
def test_sends_block_only_without_overlap(overlap: bool) -> None:
    mesh = mesh_of(sending := Sending())
    pipeline = PipelineExecutor([], mesh, mesh, mesh, torch.float32, overlap=overlap)
    pipeline.send(torch.zeros(1), 1, Label())
    assert sending.completed != overlap


def test_completed_sends_are_released_in_any_order() -> None:
    upwards, downwards = Sending(), Sending()
    mesh = mesh_of(upwards, downwards)
    pipeline = PipelineExecutor([], mesh, mesh, mesh, torch.float32)
    tensors = [torch.zeros(1), torch.zeros(1)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    for target, tensor in enumerate(tensors):
        pipeline.send(tensor, target, Label())
    del tensors, tensor
    downwards.completed = True
    pipeline.release_sent()
    assert alive[0]() is not None and alive[1]() is None


def by_backend(rank: Rank, config: RunConfig) -> list[tuple[float, float]]:
    run = build_run(rank, config)
    send_messages(run.mesh.tp, backend=True)
    return curve_of(run, 2)


def test_a_boundary_is_gathered_by_the_backends_collectives_too(tmp_path: Path) -> None:
    """As in groups too large for shared memory and point-to-point messages."""
    keys = {"parallel__tp": 2, "parallel__pp": 2, "batch__global": 4, "train__steps": 3}
    config = config_of(settings(GPT, tmp_path, **keys), tmp_path)
    results, expected = run_world(4, by_backend, config)[0], run_world(4, train_curve, config)[0]
    np.testing.assert_allclose(results, expected[:2], rtol=1e-10)
