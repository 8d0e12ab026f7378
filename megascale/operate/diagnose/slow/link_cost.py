"""The slow links of a run as suspects: what their receivers wait for messages beyond their peers.

Most of a late message is hidden: compute goes on with other micro-batches, and a pipeline has slack. What is left shows
where it is received. Peers are the other ranks of the same pipeline stage, which run the same schedule with the same
bubble; a rank that waits longer than they do ends its part of the step later by as much, unless it catches up: then its
peers do not wait for it in the reductions of gradients. The excess of the messages themselves is a bound as well: a
receiver may also wait for a slow rank before it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megascale.layout.topology import DATA_AXES
from megascale.operate.diagnose.slow.delay_matrix import SlowPath, delay_matrix
from megascale.operate.diagnose.slow.job_cost import SlowCause
from megascale.operate.diagnose.slow.step_cube import Booleans, Columns, Floats, StepCube, lower_median
from megascale.operate.diagnose.slow.step_levels import StepLevels

SIDES = {
    "send": "only what it sends is slow", "receive": "only what it receives is slow",
    "node": "what it sends and what it receives is slow",
    "link": "no other link of its ends is slow, or they have no other",
}  # fmt: skip


def slow_links(cube: StepCube, levels: StepLevels, events: Columns) -> Iterator[SlowCause]:
    """Yield the slow nodes and links of the stretches of which there are messages in the table `events`."""
    found: dict[str, dict[int, SlowPath]] = {}
    for number, stretch in enumerate(levels.stretches):
        step = np.asarray(events["step"])
        mine = (step >= stretch.first) & (step <= stretch.last)
        if mine.any():
            matrix = delay_matrix({name: column[mine] for name, column in events.items()}, cube.places)
            for path in matrix.culprits:
                found.setdefault(path.name, {})[number] = path
    for name, seen in found.items():
        path = seen[max(seen)]
        waits = message_waits(cube, path)
        evidence = (
            f"messages take {path.delay_s * 1e3:.3g} ms, elsewhere between these stages {path.peer_s * 1e3:.3g} ms",
            SIDES[path.kind],
            f"those of a step are late by {path.per_step_s:.3g} s in all",
        )
        yield SlowCause("link", name, path.ranks, waits, frozenset(seen), evidence)


def message_waits(cube: StepCube, path: SlowPath) -> Floats:
    """Return by how many seconds the receivers of a path wait longer for messages than the other ranks of their stages,
    but at most what the messages are late, [S].
    """
    received = [at for at, part in enumerate(cube.parts) if part.is_wait and part.name == "receive"]
    waits = cube.wait[:, :, received].sum(2)
    receivers = np.isin(cube.places.rank, path.receivers)
    replica = cube.places.codes(*DATA_AXES)
    behind = np.isin(replica, replica[receivers])
    longer = _most(waits, receivers, ~receivers, cube)
    if not behind.all() and "dp" in cube.axes:
        longer = np.minimum(longer, _most(-cube.wait_of("dp"), behind, ~behind, cube))
    return np.minimum(longer, path.per_step_s)


def _most(values: Floats, mine: Booleans, others: Booleans, cube: StepCube) -> Floats:
    """Return by how much some ranks exceed others of their stage at most, [S], 0 at least."""
    stage, most = cube.places.coords["pp"], [np.zeros(len(cube.steps))]
    for at in np.unique(stage[mine]):
        peers = values[(stage == at) & others]
        most.append(values[(stage == at) & mine].max(0) - (lower_median(peers) if len(peers) else 0.0))
    return np.asarray(np.max(most, 0))
