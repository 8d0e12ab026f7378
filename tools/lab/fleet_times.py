"""Own times of the ranks of a synthetic job, with injected slowdowns: what each would take without waits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megascale.layout.topology import Topology

FORWARD_S, BACKWARD_S = 0.010, 0.020
HEAD, EMBEDDING = 0.3, 0.1
"""Extra work of the last and the first stage, as a share of a chunk's."""
UPDATE_S, NORM_S, DATA_S = 0.004, 0.002, 0.001

HICCUP = 0.2
"""Largest excess of a rank's step that is long for no reason."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FleetLayout:
    """Axes of a job, chunks a rank, micro-batches, ranks of a node, steps. `jitter`: deviation of the logarithm of a
    message's delay.
    """

    topology: Topology
    chunks: int = 1
    microbatches: int = 8
    node_ranks: int = 8
    steps: int = 60
    jitter: float = 0.0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Steps, stages, replicas, tensor-parallel ranks."""
        t = self.topology
        return self.steps, t.pp, t.dp * t.cp, t.tp

    @property
    def nodes(self) -> int:
        return -(-self.topology.world_size // self.node_ranks)

    def ranks(self) -> npt.NDArray[np.int64]:
        """Return the global ranks, [pp, replica, tp]."""
        t = self.topology
        return np.array(
            [[[t.rank(t.coord(0)._replace(tp=x, cp=d % t.cp, dp=d // t.cp, pp=p)) for x in range(t.tp)]
              for d in range(t.dp * t.cp)] for p in range(t.pp)]
        )  # fmt: skip


@dataclass(frozen=True)
class FleetFault:
    """An injected slowdown: "slow", "job", "data", "gc", "decay", "link", "dp_group", or none.

    `rank`, `node` or `nodes`: the culprits, all ranks without; `peer`: the other node of a link. `factor`: slowdown of
    compute or of messages; `share`: seconds of data or gc, in forwards; `every`: mean steps between two. From position
    `since` in the steps on; a slow rank or job `until` another. A decay is pauses of all ranks in every step, longer
    and longer: up to a deviation of `share` (paper, 6.3).
    """

    kind: str = ""
    rank: int = -1
    node: int = -1
    nodes: tuple[int, ...] = ()
    peer: int = -1
    factor: float = 1.0
    share: float = 0.0
    every: int = 1
    since: int = 0
    until: int | None = None

    def culprits(self, rank: npt.NDArray[np.int64], node: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which ranks are slow."""
        if self.nodes or self.node >= 0:
            return np.isin(node, self.nodes or self.node)
        return rank == self.rank if self.rank >= 0 else np.ones_like(rank, bool)


@dataclass(frozen=True)
class OwnTimes:
    """Seconds of all ranks, [S, pp, replica, tp]; `forward` and `backward` of a micro-batch also by chunk."""

    forward: Floats
    backward: Floats
    data: Floats
    gc: Floats
    update: Floats
    norm: Floats


def own_times(
    layout: FleetLayout, fault: FleetFault, draw: np.random.Generator, *, noise: float, work: Floats,
    hiccups: float = 0.0,
) -> OwnTimes:  # fmt: skip
    """Return the times of all ranks. `noise`: deviation of a rank's speed in a step; `work` [S]: of a step relative to
    1; `hiccups`: share of a rank's steps that take up to HICCUP longer for no reason.
    """
    s, p, _, _ = shape = layout.shape
    rank = layout.ranks()
    culprits = fault.culprits(rank, rank // layout.node_ranks)
    speed = (1 + noise * draw.standard_normal(shape).clip(-3, 3)) * work[:, None, None, None]
    if hiccups:
        speed *= 1 + (draw.random(shape) < hiccups) * draw.uniform(0, HICCUP, shape)
    if fault.kind in ("slow", "job"):
        speed[fault.since : fault.until] *= 1 + (fault.factor - 1) * culprits
    stage = np.ones((p, layout.chunks))
    stage[0, 0] += EMBEDDING
    stage[-1, -1] += HEAD
    passes = speed[..., None] * stage[:, None, None, :]
    data = DATA_S * draw.uniform(0.8, 1.2, shape)
    data *= np.isin(np.arange(p), (0, p - 1))[:, None, None]
    late = (fault.kind == "decay") * fault.share * FORWARD_S * np.linspace(0, 1, s)[:, None, None, None]
    gc = np.abs(late * draw.standard_normal(shape))
    if fault.kind in ("data", "gc"):
        hits = draw.random(shape) < 1 / fault.every
        hits[: fault.since] = False
        more = hits * culprits * fault.share * FORWARD_S * draw.uniform(0.7, 1.3, shape)
        data, gc = (data + more, gc) if fault.kind == "data" else (data, gc + more)
    return OwnTimes(FORWARD_S * passes, BACKWARD_S * passes, data, gc, UPDATE_S * speed, NORM_S * speed)
