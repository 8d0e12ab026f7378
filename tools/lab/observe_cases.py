"""The cases of `python tools/lab observe`: slowdowns of synthetic jobs, drawn at random, and what findings must say.

Layout, noise, work of the steps, culprit and onset are drawn from the name and the number of a case: the same case is
the same everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lab.fleet import Fleet
from lab.fleet_times import FleetFault, FleetLayout
from megascale.layout.topology import Topology
from megascale.operate.diagnose.slow.finding import Finding, FindingKind

STEPS = 100
"""Steps of a case."""

LARGE = FleetLayout(Topology(tp=8, pp=8, dp=192), chunks=3, steps=24)
"""A job of 12,288 ranks."""

NOISES = (0.01, 0.02, 0.04)
"""Deviations of a rank's speed in a step."""

WORK = 0.7, 1.5
"""Bounds of a step's work relative to 1, in every second case."""

HICCUPS = 0.01
"""Share of a rank's steps that are up to a fifth longer for no reason, in every second case."""

HEALTHY = "healthy"

PAUSE = 0.25
"""Mean of a pause or stall, as a share of what a rank computes in a step."""


@dataclass(frozen=True)
class SlowdownKind:
    """A kind of slowdown. `finding`: the kind of finding that it must be, None for no finding; `draw` returns the fault
    of a layout, which begins at a position in the steps.
    """

    finding: FindingKind | None
    draw: Callable[[random.Random, FleetLayout, int], FleetFault]


def _rank(draw: random.Random, layout: FleetLayout) -> int:
    return draw.randrange(layout.topology.world_size)


def _slow(factor: float) -> SlowdownKind:
    return SlowdownKind(
        "compute", lambda draw, at, since: FleetFault("slow", rank=_rank(draw, at), factor=factor, since=since)
    )


def _slow_node(draw: random.Random, layout: FleetLayout, since: int) -> FleetFault:
    return FleetFault("slow", node=draw.randrange(layout.nodes), factor=1.1, since=since)


def _link(draw: random.Random, layout: FleetLayout, since: int) -> FleetFault:
    """Return a slow node, or a slow link from a node to the one of the next stage."""
    node, per_stage = draw.randrange(layout.nodes), layout.nodes // layout.topology.pp
    peer = node + per_stage
    return FleetFault("link", node=node, peer=peer if peer < layout.nodes and draw.random() < 0.5 else -1, factor=40)


def _pause(layout: FleetLayout) -> float:
    """Return PAUSE in forwards: a backward takes two."""
    return PAUSE * 3 * layout.microbatches * layout.chunks


def _gc(draw: random.Random, layout: FleetLayout, since: int) -> FleetFault:
    return FleetFault("gc", share=_pause(layout), every=layout.topology.world_size // 2, since=since)


def _data(draw: random.Random, layout: FleetLayout, since: int) -> FleetFault:
    reader = draw.randrange(layout.topology.tp)  # of the first stage
    return FleetFault("data", rank=reader, share=_pause(layout), every=3, since=since)


def _job(draw: random.Random, layout: FleetLayout, since: int) -> FleetFault:
    return FleetFault("job", factor=1.15, since=max(since, layout.steps // 2))


KINDS: Mapping[str, SlowdownKind] = {
    "rank 10% slower": _slow(1.1),
    "rank 50% slower": _slow(1.5),
    "node 10% slower": SlowdownKind("compute", _slow_node),
    "slow link": SlowdownKind("link", _link),
    "gc storm": SlowdownKind("gc", _gc),
    "data stalls": SlowdownKind("data", _data),
    "job 15% slower": SlowdownKind("job", _job),
    HEALTHY: SlowdownKind(None, lambda draw, at, since: FleetFault()),
}
"""Kinds of slowdowns by name."""


@dataclass(frozen=True)
class SlowdownCase:
    """A case. `noise`: deviation of a rank's speed in a step; `uneven`: the work of the steps varies; `hiccups`: share
    of a rank's steps that are long for no reason.
    """

    kind: str
    number: int
    layout: FleetLayout
    fault: FleetFault
    noise: float
    uneven: bool
    hiccups: float

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"

    def fleet(self) -> Fleet:
        """Return the job."""
        seed = random.Random(f"fleet of {self.name}").randrange(1 << 32)
        work = np.random.default_rng(seed).uniform(*WORK, self.layout.steps) if self.uneven else None
        return Fleet(
            self.layout, seed, self.fault, noise=self.noise, work=work, hiccups=self.hiccups,
            events=1 if self.is_large else 3,
        )  # fmt: skip

    def without_fault(self) -> SlowdownCase:
        """Return the same job without the fault."""
        return replace(self, fault=FleetFault())

    @property
    def is_large(self) -> bool:
        return self.layout.topology == LARGE.topology


def draw_case(kind: str, number: int, *, large: bool = False) -> SlowdownCase:
    """Draw a case. `large`: a job of 12,288 ranks."""
    draw = random.Random(f"{kind} {number}")
    layout = LARGE if large else _layout(draw, links=KINDS[kind].finding == "link")
    since = draw.choice([0, layout.steps // 5, 2 * layout.steps // 5])
    since = 0 if large else since  # fewer steps than a window of the analysis
    fault = KINDS[kind].draw(draw, layout, since)
    noise, uneven, hiccups = draw.choice(NOISES), draw.random() < 0.5, draw.choice([0.0, HICCUPS])
    return SlowdownCase(kind, number, layout, fault, noise, uneven, hiccups)


def _layout(draw: random.Random, *, links: bool) -> FleetLayout:
    """Draw a layout of 8 to 64 ranks, whose nodes have peers of the same stage. `links`: two nodes a stage or more send
    to the next stage.
    """
    while True:
        t = Topology(tp=draw.choice([1, 2, 4, 8]), pp=draw.choice([1, 2, 4]), dp=draw.choice([2, 4, 8]))
        layout = FleetLayout(t, node_ranks=draw.choice([2, 4, 8]), microbatches=draw.choice([8, 16]), steps=STEPS)
        layout = replace(layout, chunks=draw.choice([1, 2]) if t.pp > 1 else 1)
        per_stage = t.world_size / layout.node_ranks / t.pp
        if 8 <= t.world_size <= 64 and per_stage >= 2 and (not links or t.pp > 1):
            return layout


def names_culprit(finding: Finding, fault: FleetFault) -> bool:
    """Return True if a finding names the culprit of a fault."""
    if fault.kind == "link":
        ends = [fault.node] if fault.peer < 0 else [fault.node, fault.peer]
        return {f"n{end:04d}" for end in ends} <= set(finding.culprit.nodes)
    if fault.node >= 0:
        return (finding.culprit.kind, finding.culprit.nodes) == ("node", (f"n{fault.node:04d}",))
    return finding.culprit.ranks == ((fault.rank,) if fault.rank >= 0 else ())
