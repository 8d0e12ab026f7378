"""A dry run: one training step as one rank of a job, on fake tensors and fake process groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megascale.config.run import RunConfig
from megascale.config.train import MOCK_TEACHER
from megascale.layout.chunks import shares_embedding, stages_of
from megascale.layout.topology import Coord, topology_of
from megascale.ops.rope import rope_table
from megascale.plan.account.memory import JobMemory
from megascale.plan.account.sizes import micro_batch_sizes
from megascale.plan.dryrun.fake_mesh import FakeDevice, fake_mesh
from megascale.plan.dryrun.replay import ModuleCostCache, replay_equal_modules
from megascale.plan.dryrun.resource_counter import BytesByKind, CommCall, CountingRecorder, ResourceCounterMode
from megascale.train.build import build_rank_run
from megascale.train.run import Run
from megascale.train.step import train_step
from megascale.train.stop import StopRequest


@dataclass(frozen=True)
class DryRun:
    """The resources of a rank's step. `state`: bytes by kind before the step; `peak`: bytes by kind at the memory peak;
    `flops` by operator; `calls`: communications in order of issue.
    """

    rank: int
    coord: Coord
    state: BytesByKind
    peak: BytesByKind
    flops: Counter[str]
    calls: list[CommCall]


def dry_run(config: RunConfig, rank: int, *, collectives_in_pieces: bool = True, replay_modules: bool = True) -> DryRun:
    """Run one step (in the steady state, not the first) of a resolved configuration as `rank`.

    Data are mock. Checkpoints, evaluation and torch.compile are off. Of the phases of `fp8.schedule` it is in the one
    with the highest peak. `collectives_in_pieces`: overlapped collectives are cut into pieces, as between GPUs; False
    for CPUs, which share memory. `replay_modules`: run one of several equal modules and replay its costs for the rest,
    if micro-batches cost the same.
    """
    config = _one_step(config)
    topology = topology_of(config.parallel)
    stage = topology.coord(rank).pp
    if config.fp8.schedule:
        config = max(config.phases, key=lambda phase: JobMemory(phase).rank(stage).total)
    recorder = CountingRecorder()
    rope_table.cache_clear()  # cached tables are real tensors
    mesh = fake_mesh(
        topology, rank, recorder, tied=shares_embedding(config.model, config.parallel),
        collectives_in_pieces=collectives_in_pieces, placement=stages_of(config.model, config.parallel).placement,
    )  # fmt: skip
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), ResourceCounterMode(recorder) as counter_mode:
            with recorder.memory_kind("buffers"):
                device = FakeDevice(torch.device("cpu"), "gloo")
                run = build_rank_run(config, mesh, device, StopRequest(), init_weights=False)
            _set_state_kinds(run, counter_mode)
            state = +recorder.counts.live_bytes
            if run.fp8_state is not None:
                run.fp8_state.has_history = True
            for bucket in run.buffers.buckets:
                bucket.outdated = False
            # chunks have more keys than the one before, planned micro-batches differ, halves run layers in turns
            differ = config.num_chunks > 1 or config.parallel.hybrid_dp or config.overlap.tp == "domino"
            if replay_modules and not differ:
                split = micro_batch_sizes(config).split
                replay_equal_modules(run, ModuleCostCache(counter_mode, run.dtypes[1], split))
            with recorder.memory_kind("buffers"):
                batch = run.train_loader.batch(0)
            train_step(run, batch)
            run.buffers.finish_param_gather()
            run.pipeline.finish_sends()
            counts = recorder.counts
            return DryRun(rank, topology.coord(rank), state, +counts.at_peak, counts.flops, counts.calls)
    finally:
        rope_table.cache_clear()  # fake tables must not leak into other code


def _one_step(config: RunConfig) -> RunConfig:
    """Return the configuration of a step in the steady state, on mock data, without files."""
    data = {"mock": True, "train": None, "valid": None, "reader": "rank"}
    checkpoint = {"every": 0, "in_memory_every": 0, "replicate": False}
    train = {
        "eval_every": 0, "compile": False, "memory_dir": None,
        "distill_teacher": config.train.distill_teacher and MOCK_TEACHER,
    }  # fmt: skip
    return config.changed(data=data, batch={"rampup": None}, checkpoint=checkpoint, train=train, fp8={"monitor": False})


def _set_state_kinds(run: Run, counter_mode: ResourceCounterMode) -> None:
    for bucket, shard in zip(run.buffers.buckets, run.optimizer.shards, strict=True):
        counter_mode.set_kind(bucket.grad, "gradients")
        for tensor in (shard.master, *shard.state.values()):
            counter_mode.set_kind(tensor, "optimizer")
    for part in (run.average, run.outer):
        for tensor in part.flat_tensors() if part is not None else ():
            counter_mode.set_kind(tensor, "optimizer")
    for _, _, _, values in run.optimizer.matrix_state():
        counter_mode.set_kind(values, "optimizer")
    for bucket in run.buffers.buckets:
        counter_mode.set_kind(bucket.weights, "parameters")  # last, because fp32 weights are their own master copy
