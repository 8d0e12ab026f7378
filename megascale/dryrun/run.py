"""One step of the training program as one rank of a job, with fake tensors and groups that carry nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megascale.config.run import RunConfig
from megascale.device import Device
from megascale.dryrun.account import Accountant, Call, Kinds, Ledger
from megascale.dryrun.mesh import silent_mesh
from megascale.dryrun.rehearsal import Rehearsals, StandIn
from megascale.layout.chunks import eight_bit_layers
from megascale.layout.recompute import recompute_of
from megascale.layout.topology import Coord, topology_of
from megascale.ops.rope import rope_table
from megascale.train.build import Run, build
from megascale.train.step import train_step
from megascale.train.stop import Stop


class FakeDevice(Device):
    """A device whose numbers nobody knows: all are one."""

    def read(self, values: Tensor) -> Callable[[], list[float]]:
        return lambda: [1.0] * values.numel()


@dataclass(frozen=True)
class DryRun:
    """What a rank does in a step. `state`: bytes that it has before; `peak`: when they are most, by kind; `flops` by
    operator; `calls` in their order.
    """

    rank: int
    coord: Coord
    state: Kinds
    peak: Kinds
    flops: Counter[str]
    calls: list[Call]


def dry_run(config: RunConfig, rank: int, *, piecewise: bool = True, rehearse: bool = True) -> DryRun:
    """One step, not the first, of a resolved configuration as `rank`. Data are mock; nothing is saved or evaluated, and
    blocks are not compiled.

    `piecewise`: collectives travel while ranks compute, as between GPUs; not so through memory that CPUs share.
    `rehearse`: modules that are alike are run once.
    """
    config = _apart(config)
    ledger = Ledger()
    rope_table.cache_clear()  # of real ones
    topology = topology_of(config)
    mesh = silent_mesh(topology, rank, ledger, tied=config.model.tie_embeddings, piecewise=piecewise)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Accountant(ledger) as accountant:
            with ledger.memory("buffers"):
                device = FakeDevice(torch.device("cpu"), "gloo")
                run = build(config, mesh, device, Stop(), draw=False)
            _name_state(run, accountant)
            state = +ledger.account.live
            run.scaling.known = True
            if rehearse:
                _stand_in(run, Rehearsals(accountant, run.formats[1]))
            with ledger.memory("buffers"):
                batch = run.train.batch(0)
            train_step(run, batch)
            run.gradients.finish_gather()
            run.pipeline.finish_sends()
            account = ledger.account
            return DryRun(rank, topology.coord(rank), state, +account.at_peak, account.flops, account.calls)
    finally:
        rope_table.cache_clear()  # of fake tensors, which nobody else may find


def _apart(config: RunConfig) -> RunConfig:
    """The configuration without what is not a step's."""
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"mock": True, "train": None, "valid": None}),
            "checkpoint": config.checkpoint.model_copy(update={"every": 0, "memory_every": 0, "replicate": False}),
            "train": config.train.model_copy(update={"eval_every": 0, "compile": False}),
            "fp8": config.fp8.model_copy(update={"monitor": False}),
        }
    )


def _name_state(run: Run, accountant: Accountant) -> None:
    for bucket, shard in zip(run.gradients.buckets, run.optimizer.shards, strict=True):
        accountant.name(bucket.grad, "gradients")
        for tensor in (shard.master, *shard.state.values()):
            accountant.name(tensor, "optimizer")
        accountant.name(bucket.weights, "parameters")  # which a master copy may be


def _stand_in(run: Run, rehearsals: Rehearsals) -> None:
    """Put a stand in the place of every module that a stage calls."""
    m, cast = run.config.model, eight_bit_layers(run.config)
    if m.position == "rope":  # one table for all layers
        wide = torch.promote_types(run.formats[0], torch.float32)
        rope_table(m.seq_length, m.head_dim, m.rope_theta, wide, run.device.torch)
    anchor = torch.zeros((), requires_grad=True)

    def stand(module: nn.Module, like: Hashable, layer: int = -1, again: bool = False) -> StandIn:
        return StandIn(module, like, layer, rehearsals, anchor, again)

    for chunk, part in enumerate(run.stages):
        recompute = recompute_of(run.config.train, chunk)
        for name, block in list(part.layers.items()):
            layer = int(name)
            part.layers[name] = stand(block, (m.windows[layer], layer in cast, recompute), layer, recompute.full)
        if part.embedding is not None:
            part.embedding = stand(part.embedding, "embedding")  # type: ignore[assignment]
        if part.head is not None:
            part.head = stand(part.head, "head")  # type: ignore[assignment]
