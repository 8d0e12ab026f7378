"""Activations of split backwards, measured: what an I frees, and the peaks of schedules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from megascale.config.run import RunConfig
from megascale.layout.blocks import block_spec
from megascale.layout.chunks import stages_of
from megascale.layout.recompute_policy import NO_RECOMPUTE
from megascale.parallel.grad_accumulation import WeightGradients
from megascale.parallel.recompute import run_backward
from megascale.plan.account.activations import TOKEN, head_bytes
from megascale.plan.account.memory import JobMemory
from tests.marks import only_quick
from tests.runs import LLAMA, config_of, settings
from tests.thread_world import run_threads

SCHEDULES = {"zb_h1": 1, "interleaved_zb": 2, "zb_v": 2}  # with their chunks per rank


def configure(folder: Path, schedule: str, layers: int, **more: Any) -> RunConfig:
    layout = {"parallel__pp": 2, "parallel__vpp": SCHEDULES[schedule], "parallel__schedule": schedule}
    return config_of(settings(LLAMA, folder, model__num_layers=layers, **layout, **more), folder)


def watched(run: Any, body: Callable[[Callable[[], int]], None]) -> int:
    """Run body(live), where live() counts the bytes of activations, and return their peak."""
    from megascale.plan.dryrun.resource_counter import CountingRecorder, ResourceCounterMode

    recorder = CountingRecorder()
    mode = ResourceCounterMode(recorder)
    with recorder.memory_kind("parameters"):  # there before: views of them are no activations
        for bucket in run.buffers.buckets:
            mode.track(bucket.weights)
            mode.track(bucket.storage.full_grad)
    run.buffers.begin_step()
    with mode:
        body(lambda: recorder.counts.live_bytes["activations"])
    return recorder.counts.at_peak["activations"]


def peak_of_a_step(run: Any) -> int:
    batch = run.train_loader.batch(0)
    order = run.order_of(len(batch.micro_batches), True)
    return watched(run, lambda live: run.pipeline.run_actions(order, batch))


def peaks(folder: Path, schedule: str, layers: int, **more: Any) -> tuple[list[int], JobMemory]:
    config = configure(folder, schedule, layers, **more)
    return run_threads(config, peak_of_a_step), JobMemory(config)


def saved_by(job: JobMemory, rank: int) -> int:
    """Count the bytes that a micro-batch saves in the chunks of a rank."""
    stages = job.layout
    chunks = [stages.index(rank, chunk) for chunk in range(stages.vpp)]
    layers = [layer for index in chunks for layer in stages.layers(index)]
    head = head_bytes(job.sizes).saved if stages.count - 1 in chunks else 0
    return sum(job.layer(layer, NO_RECOMPUTE).saved for layer in layers) + head


@pytest.mark.parametrize("schedule", only_quick(SCHEDULES, "zb_v"))
def test_p_micro_batches_are_live_on_every_rank(schedule: str, tmp_path: Path) -> None:
    found, job = peaks(tmp_path, schedule, 32, train__precision="fp32", batch__global=6)
    for rank, peak in enumerate(found):
        assert peak == pytest.approx(2 * saved_by(job, rank), rel=0.05)


@pytest.mark.parametrize("schedule", only_quick(SCHEDULES, "zb_v"))
def test_recomputed_chunks_wait_for_no_w(schedule: str, tmp_path: Path) -> None:
    """A chunk has the operands of its linear layers, all that it does not save, from I to W, one chunk at a time."""
    keys = {"train__recompute": "full", "train__precision": "bf16"}
    (short, job), (long, _) = (peaks(tmp_path, schedule, 16, batch__global=m, **keys) for m in (4, 8))
    others = 3 * job.sizes.message + 4 * 2 * TOKEN * job.sizes.tokens  # messages under way; ids and labels of four more
    assert long == pytest.approx(short, abs=others)
    whole = JobMemory(configure(tmp_path, schedule, 16, batch__global=4, train__precision="bf16"))
    largest = max(layer.weight_numel for part in block_spec(job.config.model, 0) for layer in part.linears)
    cast = largest * job.sizes.wide  # of a weight's gradient, for an addition on a CPU; of large ones a block at a time
    for rank, peak in enumerate(short):
        planned = job.rank(rank).activations + job.rank(rank).transient
        assert peak - cast <= planned <= 1.05 * peak
        assert peak < whole.rank(rank).activations


def left_by_i(run: Any) -> list[int]:
    """Count the bytes of activations after the F, the I and the W of a micro-batch on the first stage."""
    batch, found = run.train_loader.batch(0).micro_batches[0], list[int]()

    def body(live: Callable[[], int]) -> None:
        out = run.stages[0](None, batch).activation
        edge, grad = get_gradient_edge(out), torch.ones_like(out.detach())
        del out
        found.append(live())
        left = WeightGradients()
        with run.buffers.input_gradient(0, left):
            run_backward([edge], [grad])
        del edge, grad
        found.append(live())
        with run.buffers.backward(0, last=False):
            left.run()
        found.append(live())

    if run.mesh.coord.pp == 0:
        watched(run, body)
    return found


def test_after_i_only_operands_of_weight_gradients_stay(tmp_path: Path) -> None:
    """An input per group of linear layers that share it, and an output gradient per linear layer."""
    config = configure(tmp_path, "zb_h1", 8, train__precision="fp32")
    (after_f, after_i, after_w), _ = run_threads(config, left_by_i)
    model, sizes = config.model, JobMemory(config).sizes
    layers = stages_of(model, config.parallel).layers(0)
    features = sum(
        sum({layer.inputs for layer in part.linears}) + sum(layer.outputs for layer in part.linears)
        for index in layers
        for part in block_spec(model, index)
    )
    operands = sizes.tokens * (8 + sizes.compute * (model.hidden_size + features))  # of the embedding: ids, gradient
    norms = 2 * len(layers) * sizes.compute * model.hidden_size
    assert norms <= after_i - operands <= 2 * norms
    assert after_w < 2 * norms < after_f
