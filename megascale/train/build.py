"""From a configuration to a run, in the order in which its parts depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.schedules import SCHEDULES
from megascale.checkpoint.checkpoints import Checkpoints
from megascale.checkpoint.state import Progress
from megascale.comm import symmetric
from megascale.comm.group import alone
from megascale.comm.mesh import Mesh, open_mesh
from megascale.comm.warm_up import warm_up
from megascale.config.run import RunConfig
from megascale.core.errors import DataError
from megascale.core.rank import Rank
from megascale.data.loader import Loader, Samples, Shape
from megascale.data.mixture import SplitName, mixture
from megascale.device import Device
from megascale.layout.chunks import chunk_buckets, stages_of
from megascale.layout.recompute import recompute_of
from megascale.layout.topology import topology_of
from megascale.model.initialize import fill
from megascale.model.parts import Given, Operators
from megascale.model.transformer import Stage
from megascale.ops import select
from megascale.ops.select import Setting
from megascale.ops.wgrad import Wgrad
from megascale.optim.lr import learning_rate
from megascale.optim.sharded import ShardedOptimizer
from megascale.parallel.eight_bit import Scaling, numerics_of
from megascale.parallel.gradients import Gradients
from megascale.parallel.overlap import TensorAxis
from megascale.parallel.pipeline import Boundary, Pipeline
from megascale.schedule.ir import Order, forwards_only, schedule
from megascale.schedule.lower import AHEAD, lower_rank
from megascale.schedule.precedence import Precedence
from megascale.trace.recorder import Recorder
from megascale.train.stop import Stop

Formats = tuple[torch.dtype, torch.dtype]
"""Of compute, and of what accumulates."""


@dataclass
class Run:
    """A run on one rank, built. `progress` is the only part that is replaced by numbers; the rest changes in place."""

    config: RunConfig
    device: Device
    mesh: Mesh
    formats: Formats
    stages: list[Stage]
    gradients: Gradients
    scaling: Scaling
    optimizer: ShardedOptimizer
    pipeline: Pipeline
    train_order: Order
    valid_order: Order
    train: Loader
    valid: Loader | None
    valid_batches: int
    lr: Callable[[int], float]
    checkpoints: Checkpoints
    progress: Progress
    stop: Stop


def mesh_of(config: RunConfig, rank: Rank, device: Device) -> Mesh:
    """This rank's groups in the layout of a resolved configuration. The job's processes have been brought together."""
    p = config.parallel
    recorder = Recorder(device.timer(), on=config.observe.ledger)
    mesh = open_mesh(
        topology_of(config),
        rank.rank,
        tied=config.model.tie_embeddings,
        around=p.vpp > 1,
        recorder=recorder,
        launch=config.launch,
        nccl=config.nccl,
    )
    warm_up(mesh, device, around=p.vpp > 1)
    return mesh


def build(config: RunConfig, mesh: Mesh, device: Device, stop: Stop, *, draw: bool = True) -> Run:
    """Build this rank's part of a run. `config` is resolved; `mesh` has its layout. `draw`: give the weights their
    initial values; else they are zero.
    """
    formats = number_formats(config)
    fused = config.overlap.tp and symmetric.usable(mesh.tp, device)
    axis = TensorAxis(mesh.tp, config.parallel.sp, config.overlap.tp, fused, gpu=not device.is_cpu)
    setting = Setting.of(config, device)
    gradients = build_gradients(config, mesh, formats, device.torch, select.build("wgrad", setting))
    if draw:
        draw_weights(gradients, mesh, config.train.seed)
    scaling = Scaling(config, mesh, device.torch, select.build("linear", setting))
    stages = build_stages(config, mesh, gradients, axis, Operators.of(setting), scaling)
    rule = select.build("optimizer", setting)
    optimizer = ShardedOptimizer(gradients.buckets, mesh, config.optimizer, rule)
    train, valid, valid_batches = build_loaders(config, mesh, device)
    return Run(
        config=config,
        device=device,
        mesh=mesh,
        formats=formats,
        stages=stages,
        gradients=gradients,
        scaling=scaling,
        optimizer=optimizer,
        pipeline=build_pipeline(config, mesh, stages, gradients, formats, device.torch),
        train_order=build_order(config, mesh.coord.pp),
        valid_order=build_order(config, mesh.coord.pp, training=False),
        train=train,
        valid=valid,
        valid_batches=valid_batches,
        lr=learning_rate(config.optimizer, config.train.steps),
        checkpoints=Checkpoints(config, mesh, optimizer.shards, scaling, device),
        progress=Progress(),
        stop=stop,
    )


def number_formats(config: RunConfig) -> Formats:
    """The torch types of `train.precision`."""
    facts = PRECISIONS[config.train.precision].facts
    return getattr(torch, facts["compute"]), getattr(torch, facts["accumulate"])


def build_gradients(config: RunConfig, mesh: Mesh, formats: Formats, device: torch.device, wgrad: Wgrad) -> Gradients:
    """Allocate this rank's weights and gradients. `wgrad`: the GEMM that adds to these."""
    untied = replace(mesh, tied=alone("tied"))  # a chunk of the embedding alone is one bucket of it, shared or not
    return Gradients(
        chunk_buckets(config, mesh.coord.pp),
        mesh if config.model.tie_embeddings else untied,
        zero=config.parallel.zero,
        sequence=config.parallel.sp,
        overlap=config.overlap.dp,
        formats=formats,
        device=device,
        wgrad=wgrad,
    )


def draw_weights(gradients: Gradients, mesh: Mesh, seed: int) -> None:
    """Give this rank's weights their initial values."""
    for bucket in gradients.buckets:
        for slot in bucket.layout.slots:
            fill(bucket.parameters[slot.parameter.name], slot.parameter, mesh.topology, mesh.coord, seed)


def build_stages(
    config: RunConfig, mesh: Mesh, gradients: Gradients, axis: TensorAxis, operators: Operators, scaling: Scaling
) -> list[Stage]:
    """The modules of this rank's model chunks, over the weights in `gradients`."""
    layout, found = stages_of(config), []
    numerics = partial(numerics_of, scaling=scaling, axis=axis)
    for chunk in range(config.parallel.vpp):
        index = layout.index(mesh.coord.pp, chunk)
        first, last = index == 0, index == layout.count - 1
        recompute = recompute_of(config.train, chunk)
        given = Given(config.model, gradients.parameters(chunk), axis, operators, numerics, recompute)
        found.append(Stage(given, layout.layers(index), first, last, gradients.crossing(chunk)))
    return found


def build_order(config: RunConfig, pp_rank: int, training: bool = True) -> Order:
    """What a pipeline rank does in a step, or in an evaluation of one global batch."""
    p = config.parallel
    assert p.schedule is not None, "a resolved configuration names its schedule"
    compute = schedule(SCHEDULES[p.schedule].load(), p.pp, p.vpp, config.micro_batches)
    return lower_rank(
        Precedence(compute if training else forwards_only(compute), p.vpp),
        pp_rank,
        ahead=AHEAD if config.overlap.pp else 0,
        training=training,
        reduce_each=p.zero == 2,
    )


def build_pipeline(
    config: RunConfig, mesh: Mesh, stages: list[Stage], gradients: Gradients, formats: Formats, device: torch.device
) -> Pipeline:
    """The executor of this rank's actions."""
    m = config.model
    rows = m.seq_length // mesh.tp.size if config.parallel.sp else m.seq_length
    cut_by = alone("tp") if config.parallel.sp else mesh.tp
    boundary = Boundary((rows, config.batch.micro, m.hidden_size), formats[0], device, cut_by)
    return Pipeline(stages, gradients, mesh, boundary, formats[1])


def build_loaders(config: RunConfig, mesh: Mesh, device: Device) -> tuple[Loader, Loader | None, int]:
    """Loaders of training and validation data, and how many batches an evaluation has."""
    total = config.batch.total
    train, _ = _loader(config, "train", config.train.steps * total, mesh, device, config.model.dropout)
    if not config.train.eval_every:
        return train, None, 0
    valid, samples = _loader(config, "valid", config.train.eval_steps * total, mesh, device, dropout=0.0)
    return train, valid, samples // total


def _loader(
    config: RunConfig, split: SplitName, wanted: int, mesh: Mesh, device: Device, dropout: float
) -> tuple[Loader, int]:
    """A split's loader and the number of its samples. Rank 0 builds first: it writes the indices that others read; of
    mock data there are none, and as many samples as are wanted.

    Raises: DataError on rank 0 for data that cannot be used.
    """
    total = config.batch.total
    samples: Samples | None = None
    if mesh.rank == 0:
        samples = mixture(config, split, wanted)
        if samples.samples < total:
            raise DataError(
                f"{samples.samples} samples to {'train' if split == 'train' else 'validate'} on are fewer than one "
                f"global batch of {total}",
                mend="more data, another data.split, or a smaller batch.global",
            )
    count = samples.samples if samples is not None else wanted
    if not config.data.mock:
        count = mesh.world.control.broadcast(count, f"samples of {split}")
    if samples is None and mesh.coord.pp in (0, mesh.topology.pp - 1):
        samples = mixture(config, split, wanted)
    shape = Shape(total, config.batch.micro, config.dp)
    return Loader(samples, shape, mesh.coord.dp, dropout=dropout, seed=config.train.seed, device=device.torch), count
