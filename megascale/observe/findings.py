"""The causes that slow a run down, in plain words: the findings of all analyses, each cause once.

`findings` reads an event store, `combine` decides. A slow rank explains the waits of others, a link the slow groups
over it, pauses the spread of entries; what is left of the drift concerns all ranks and names nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megascale.core.rank import format_ranks
from megascale.eventstore.query import fetch
from megascale.observe.cube_queries import NEWEST_STEP, is_sampled, peak_flops, recent_cube, sampled_cube
from megascale.observe.delay_matrix import DelayMatrix, delay_matrix
from megascale.observe.drift import Drift, Growth, drift
from megascale.observe.link_cost import link_cost, message_waits
from megascale.observe.mfu_ledger import BACKWARD, FORWARD, OPTIMIZER
from megascale.observe.step_cube import StepCube
from megascale.observe.step_work import MAX_EXCESS, predict_seconds, slow_steps
from megascale.observe.stragglers import WINDOW, SlowGroup, gc_pauses, slow_groups, stragglers

if TYPE_CHECKING:
    import duckdb

MESSAGE_ROWS = 2_000_000
"""Most rows of `events` that the delays of messages are taken from: those of the newest steps."""

MIN_LATE_SHARE = 0.005
"""Smallest share of a step by which slow messages are late, added up over the step, to be named."""

MIN_LINK_SHARE = 0.001
"""Smallest share of a step that slow messages cost to be named."""

MIN_HOST_SHARE = 0.005
"""Smallest share of a step that a rank or node costs by time outside of recorded actions, to be named."""

MIN_DATA_SHARE = 0.05
"""Smallest share of a step in which the ranks that read data do nothing else, to be named."""

MIN_SLOW_STEPS_SHARE = 0.01
"""Smallest share of the time that single slow steps cost to be named."""

MAX_SLOW_STEPS = 0.2
"""Largest share of slow steps: with more, steps vary for a reason that the prediction does not know."""

ALL = "all ranks"

FindingKind = Literal["compute", "data", "host", "gc", "link", "communication", "job", "drift", "steps"]


@dataclass(frozen=True)
class Finding:
    """A cause of lost time. `culprit`: 'rank 5', 'node n3', 'link n3 - n7', a group, or 'all ranks'; `ranks` are empty
    for all ranks. `since`, `until`: steps; `until` is None if it goes on. `cost_s`: lost seconds of a step, estimated.
    """

    kind: FindingKind
    culprit: str
    ranks: tuple[int, ...]
    since: int
    until: int | None
    cost_s: float
    cost_share: float
    evidence: tuple[str, ...]

    def __str__(self) -> str:
        span = f"since step {self.since}" if self.until is None else f"steps {self.since} to {self.until}"
        return f"{self.culprit}: {WORDS[self.kind]}, {span}; costs {self.cost_s:.3g} s a step ({self.cost_share:.1%})"

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and the summary."""
        return asdict(self) | {"summary": str(self)}


WORDS: dict[FindingKind, str] = {
    "compute": "computes slowly", "data": "waits for data", "host": "loses time on the host",
    "gc": "garbage collection pauses it", "link": "messages are slow", "communication": "collectives are slow",
    "job": "the whole job became slower", "drift": "ranks wait longer for each other", "steps": "single steps are slow",
}  # fmt: skip

SIDES = {
    "send": "only what it sends is slow", "receive": "only what it receives is slow",
    "node": "what it sends and what it receives is slow",
    "link": "no other link of its ends is slow, or they have no other",
}  # fmt: skip

KIND_OF_PART: dict[str, FindingKind] = {
    FORWARD: "job", BACKWARD: "job", OPTIMIZER: "job", "data": "data", "other": "host", "gc": "gc",
}  # fmt: skip
"""Kinds of findings about all ranks, by the part that grew."""


def findings(store: duckdb.DuckDBPyConnection) -> list[Finding]:
    """Return the findings about a run's store (`eventstore.query.open_store`), the costliest first."""
    cube, peak = recent_cube(store), peak_flops(store)
    first = cube.steps.min(initial=np.iinfo(np.int32).max)  # earlier ones are old, or ranks were on other nodes
    last = f"(SELECT (max(attempt), step) FROM steps WHERE step >= {first} AND step <= {NEWEST_STEP} GROUP BY step)"
    messages = f"events WHERE peer >= 0 AND step >= {first} AND (attempt, step) IN {last}"
    counts = fetch(store, f"SELECT step, count(*) AS rows FROM {messages} GROUP BY step ORDER BY step DESC")
    newest = counts["step"][np.cumsum(counts["rows"]) <= MESSAGE_ROWS]
    events = fetch(store, f"SELECT * FROM {messages} AND step >= {newest.min(initial=np.iinfo(np.int32).max)}")
    return combine(cube, drift(sampled_cube(store), peak), delay_matrix(events, cube.places))


def combine(cube: StepCube, change: Drift, matrix: DelayMatrix) -> list[Finding]:
    """Return the findings of all analyses, each cause once."""
    if not len(cube.steps):
        return []
    found = [*_stragglers(cube), *_links(cube, matrix)]
    linked = {rank for finding in found if finding.kind == "link" for rank in finding.ranks}
    found += _groups(cube, [group for group in slow_groups(cube) if linked.isdisjoint(group.ranks)])
    if (pauses := gc_pauses(cube)) is not None:
        culprit = format_ranks(pauses.ranks) if pauses.ranks else ALL
        spread = change.to_text().splitlines()[-1:] if change.spread else []
        evidence = (*pauses.evidence, *spread)
        found.append(_finding(cube, "gc", culprit, pauses.ranks, pauses.cost_s, evidence, pauses.since))
    found += _data_of_all(cube, found)
    found += _changes(cube, change, found)
    found += [] if found else _single_steps(cube)
    return sorted(found, key=lambda finding: -finding.cost_s)


def _finding(
    cube: StepCube, kind: FindingKind, culprit: str, ranks: Sequence[int], cost_s: float, evidence: Sequence[str],
    since: int | None = None, until: int | None = None,
) -> Finding:  # fmt: skip
    first = int(cube.steps[0]) if since is None else since
    share = cost_s / max(cube.step_s, 1e-12)
    return Finding(kind, culprit, tuple(ranks), first, until, cost_s, share, tuple(evidence))


def _stragglers(cube: StepCube) -> Iterator[Finding]:
    for straggler in stragglers(cube):
        worst, since, until = straggler.worst, straggler.since, straggler.until
        if worst.kind == "host" and worst.cost_share < MIN_HOST_SHARE:
            continue
        yield _finding(cube, worst.kind, worst.name, worst.ranks, worst.cost_s, straggler.evidence, since, until)


def _links(cube: StepCube, matrix: DelayMatrix) -> Iterator[Finding]:
    """Yield the slow nodes and links that cost something in the newest window."""
    newest = cube.take(slice(-WINDOW, None))
    waits = message_waits(newest) if matrix.culprits else np.zeros(0)
    for path in matrix.culprits:
        cost_s = link_cost(newest, path, waits)
        if path.per_step_s >= MIN_LATE_SHARE * cube.step_s and cost_s >= MIN_LINK_SHARE * cube.step_s:
            evidence = (
                f"messages take {path.delay_s * 1e3:.3g} ms, elsewhere between these stages {path.peer_s * 1e3:.3g} ms",
                SIDES[path.kind],
                f"those of a step are late by {path.per_step_s:.3g} s in all; a receiver waits {cost_s:.3g} s of it, "
                "or less, longer than its peers",
            )
            yield _finding(cube, "link", path.name, path.ranks, cost_s, evidence)


def _groups(cube: StepCube, groups: Sequence[SlowGroup]) -> Iterator[Finding]:
    """Yield a finding for the slow groups of an axis and operation."""
    for axis, operation in dict.fromkeys((group.axis, group.operation) for group in groups):
        mine = [group for group in groups if (group.axis, group.operation) == (axis, operation)]
        ranks, worst = sorted({rank for group in mine for rank in group.ranks}), mine[0]
        name = worst.name if len(mine) == 1 else f"{len(mine)} {axis} groups of {format_ranks(ranks)}"
        evidence = (
            f"in {operation} even the last rank to enter waits {worst.seconds * 1e3:.3g} ms a step, in other groups "
            f"{worst.peer_s * 1e3:.3g} ms",
            "`megascale doctor nodes` measures the links between the nodes of a group",
        )
        yield _finding(cube, "communication", name, ranks, worst.cost_s, evidence)


def _data_of_all(cube: StepCube, found: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the reading of data, if it takes long on the median of the ranks that read."""
    seconds = cube.mean(cube.data)
    reading = seconds[seconds > 0]
    if len(reading) and not any(finding.kind == "data" for finding in found):
        typical = float(np.median(reading))
        if typical >= MIN_DATA_SHARE * cube.step_s:
            line = f"a rank reads its batch for {typical:.3g} s of a step of {cube.step_s:.3g} s, in the median"
            yield _finding(cube, "data", ALL, (), typical, (line,))


def _changes(cube: StepCube, change: Drift, found: Sequence[Finding]) -> Iterator[Finding]:
    """Yield what grew on all ranks, and growing waits that no finding explains."""
    kinds: dict[FindingKind, list[Growth]] = {}
    for growth in change.growths:
        if growth.everywhere and growth.part in KIND_OF_PART:
            kinds.setdefault(KIND_OF_PART[growth.part], []).append(growth)
    known = {finding.kind for finding in found}
    slower = [growth for growth in change.growths if growth.part in (FORWARD, BACKWARD)]
    if slower and not (found or kinds) and _have_no_peers(cube, slower[0].ranks):
        yield _slower_ranks(cube, change, slower)
        return
    if not (found or kinds) and (change.growths or change.spread):
        kinds["drift"] = list(change.growths)
    for kind, growths in kinds.items():
        if kind not in known:
            spread = [change.spread.since] if change.spread else []
            since = min([growth.since for growth in growths] or spread)
            cost = max(0.0, change.step_after_s - change.step_before_s)
            yield _finding(cube, kind, ALL, (), cost, change.to_text().splitlines(), since)


def _have_no_peers(cube: StepCube, ranks: Sequence[int]) -> bool:
    """Return True if ranks of a sample (`cube_queries.sampled_cube`) are whole stages: nobody to compare with."""
    stage, rank = cube.places.coords["pp"], cube.places.rank
    mine = np.isin(stage, stage[cube.places.index(np.array(ranks, int))])
    return bool(ranks) and set(rank[mine & is_sampled(rank)].tolist()) <= set(ranks)


def _slower_ranks(cube: StepCube, change: Drift, growths: Sequence[Growth]) -> Finding:
    """Return the finding about whole stages whose compute grew: they have no peers but their own past."""
    ranks = growths[0].ranks
    at = cube.places.index(np.array(ranks))
    nodes, stages = np.unique(cube.places.node[at]), np.unique(cube.places.coords["pp"][at])
    culprit = f"node {cube.places.nodes[nodes[0]]}" if len(nodes) == 1 and len(ranks) > 1 else format_ranks(ranks)
    culprit = f"stage {stages[0]}" if len(stages) == 1 and len(nodes) > 1 else culprit
    cost = max(0.0, change.step_after_s - change.step_before_s)
    since = min(growth.since for growth in growths)
    return _finding(cube, "compute", culprit, ranks, cost, change.to_text().splitlines(), since)


def _single_steps(cube: StepCube) -> Iterator[Finding]:
    """Yield the steps that take longer than their work predicts, if they cost much."""
    wall, ordinary = cube.wall.mean(0, dtype=np.float64), np.asarray(cube.ordinary.all(0))
    slow = slow_steps(cube.tokens, cube.flops, wall, ordinary)
    excess = np.where(slow, wall - predict_seconds(cube.tokens, cube.flops, wall, ordinary), 0.0)
    if excess.sum() < MIN_SLOW_STEPS_SHARE * wall.sum() or not 0 < slow.mean() <= MAX_SLOW_STEPS:
        return
    worst = int(np.argmax(excess))
    grown = (cube.own - np.median(cube.own, 1, keepdims=True))[:, worst] * [not part.is_wait for part in cube.parts]
    rank, part = np.unravel_index(int(np.argmax(grown)), grown.shape)
    numbers = [str(number) for number in cube.steps[slow]]
    evidence = (
        f"{len(numbers)} of {len(wall)} steps take {MAX_EXCESS:.0%} longer than their tokens and FLOPs predict: "
        f"{', '.join(numbers[:8])}{', ...' if len(numbers) > 8 else ''}",
        f"step {cube.steps[worst]} takes {wall[worst]:.3g} s; what grew most is {cube.parts[part]} on rank "
        f"{cube.places.rank[rank]}, by {float(grown[rank, part]):.3g} s",
    )
    yield _finding(cube, "steps", ALL, (), float(excess.sum()) / len(wall), evidence, int(cube.steps[slow][0]))
