"""The two stories of the paper about slow runs, as synthetic jobs: 0.5% of the machines are slow (5.1), and the MFU
falls by irregular pauses of Python's garbage collector (6.3).
"""

from __future__ import annotations

import numpy as np

from lab.fleet import Fleet
from lab.fleet_times import FleetFault, FleetLayout
from megascale.layout.topology import Topology

SLOW_SHARE, SLOW_FACTOR = 0.005, 1.1
"""Share of the machines that are slow, and by how much (paper, 5.1)."""

PAUSES = 6.0
"""Deviation of the pauses at the end of the run, in forwards of a micro-batch."""


def slow_machines(replicas: int = 192, steps: int = 20, seed: int = 1) -> tuple[Fleet, tuple[str, ...]]:
    """Return a job of 64 ranks a replica on machines of eight, of which SLOW_SHARE are slow, and their names. They are
    of the last stage, which has the output layer: in another stage they would cost nothing.
    """
    layout = FleetLayout(Topology(tp=8, pp=8, dp=replicas), steps=steps)
    count = max(1, int(SLOW_SHARE * layout.nodes))
    stage = np.arange(layout.nodes - replicas, layout.nodes)
    nodes = np.sort(np.random.default_rng(seed).choice(stage, count, replace=False))
    fault = FleetFault("slow", nodes=tuple(map(int, nodes)), factor=SLOW_FACTOR)
    return Fleet(layout, seed, fault, events=0), tuple(f"node n{node:04d}" for node in nodes)


def mfu_decay(steps: int = 1000, seed: int = 1, *, recorded: bool = True) -> Fleet:
    """Return a job of 16 ranks whose pauses become longer. `recorded`: False for pauses that nobody sees."""
    layout = FleetLayout(Topology(tp=2, pp=2, dp=4), steps=steps)
    return Fleet(layout, seed, FleetFault("decay", share=PAUSES), events=0, gc_recorded=recorded)
