"""The ranks and nodes that slow a run down, since when, and why: computation, data, or the host.

In a synchronous job a slow rank waits less than its peers, and everybody else waits for it: waits are evidence, never
the verdict. `stragglers` compares own times (`observe.heatmap`) in windows of a run. A cause that slows all ranks
alike names nobody. `gc_pauses` and `slow_groups` find pauses for garbage collection, and groups with slow collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megascale.core.rank import format_ranks
from megascale.layout.topology import AXES
from megascale.observe.heatmap import KINDS, MAD_TO_DEVIATION, MIN_SCORE, Kind, Outlier, heat_map, lower_median
from megascale.observe.job_cost import Excess, job_costs
from megascale.observe.step_cube import Floats, Integers, Part, StepCube

WINDOW = 50
"""Steps of a window."""

MIN_GROUP_RATIO = 1.5
MIN_GROUPS = 2
"""Smallest ratio of a slow group's transfer to its peers', and fewest groups to compare."""

MIN_PAUSED_STEPS = 3
"""Fewest steps with a pause of some ranks: one pause is not a habit."""

SAME_SIZE = 0.1
"""Largest relative difference in bytes between a group and its next larger peer."""

PERSISTENT = 0.8
"""Share of the steps in which a slow group is slow."""

MIN_COST_SHARE = 0.01
"""Smallest share of a step that pauses or slow collectives cost to be named."""

REASONS: dict[Kind, str] = {
    "compute": "computes longer", "data": "reads its data longer", "host": "is longer outside of recorded actions",
}  # fmt: skip


@dataclass(frozen=True)
class Straggler:
    """A slow rank or node: `worst` of its windows, and the first and last step in which it is slow. `until` is None if
    it still is in the last window. `evidence`: in plain words.
    """

    worst: Outlier
    since: int
    until: int | None
    evidence: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"name": self.worst.name, "kind": self.worst.kind}


def stragglers(cube: StepCube) -> tuple[Straggler, ...]:
    """Return the stragglers of a run, the costliest first: those of the newest window, and of two or more others."""
    found: dict[tuple[Kind, str], list[tuple[int, Outlier]]] = {}
    windows = _windows(len(cube.steps))
    for number, window in enumerate(windows):
        for outlier in heat_map(cube.take(window)).outliers:
            found.setdefault((outlier.kind, outlier.name), []).append((number, outlier))
    result = []
    for seen in _with_their_nodes(found).values():
        first, last = seen[0][0], seen[-1][0]
        if first == last < len(windows) - 1:
            continue  # a disturbance of one window that is over
        worst = max((outlier for _, outlier in seen), key=lambda outlier: (bool(outlier.node), outlier.cost_s))
        since = _onset(cube.take(slice(windows[max(0, first - 1)].start, windows[first].stop)), worst)
        until = None if last == len(windows) - 1 else int(cube.steps[windows[last].stop - 1])
        evidence = _evidence(cube.take(windows[last]), worst, since)
        result.append(Straggler(worst, since, until, tuple(evidence)))
    return tuple(sorted(result, key=lambda straggler: -straggler.worst.cost_s))


def _with_their_nodes(
    found: dict[tuple[Kind, str], list[tuple[int, Outlier]]],
) -> dict[tuple[Kind, str], list[tuple[int, Outlier]]]:
    """Return the outliers by kind and culprit: a rank counts as its node, if that is slow in another window."""
    nodes = {(kind, rank): name for kind, name in found for rank in found[kind, name][0][1].ranks
             if found[kind, name][0][1].node}  # fmt: skip
    joined: dict[tuple[Kind, str], list[tuple[int, Outlier]]] = {}
    for (kind, name), seen in found.items():
        joined.setdefault((kind, nodes.get((kind, seen[0][1].ranks[0]), name)), []).extend(seen)
    return {key: sorted(seen, key=lambda each: each[0]) for key, seen in joined.items()}


def _windows(steps: int) -> list[slice]:
    """Cut steps into windows that end with the last step; a shorter rest at the beginning joins the first one."""
    starts = sorted(range(steps - WINDOW, -1, -WINDOW)) or [0]
    starts[0] = 0
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], steps], strict=True)]


def _excess(cube: StepCube, outlier: Outlier) -> Floats:
    """Return the mean excess of a culprit's ranks over their peers in each step, [S]."""
    values = (cube.compute, cube.data, cube.other)[KINDS.index(outlier.kind)]
    ranks, stage = cube.places.index(np.array(outlier.ranks)), cube.places.coords["pp"]
    peers = {role: lower_median(values[stage == role]) for role in np.unique(stage[ranks])}
    return np.asarray(np.mean([values[rank] - peers[stage[rank]] for rank in ranks], 0))


def _onset(cube: StepCube, outlier: Outlier) -> int:
    """Return the step from which a culprit is slow: the largest upward shift of its excess (CUSUM)."""
    excess = _excess(cube, outlier)
    sums = np.cumsum(excess - excess.mean())
    onset = int(np.argmin(sums[:-1])) + 1 if len(sums) > 1 else 0
    shifts = onset and excess[:onset].mean() < 0.5 * excess[onset:].mean()
    return int(cube.steps[onset if shifts else 0])


def _evidence(cube: StepCube, outlier: Outlier, since: int) -> Iterator[str]:
    ranks = cube.places.index(np.array(outlier.ranks))
    stage = np.unique(cube.places.coords["pp"][ranks])
    peers = int(np.isin(cube.places.coords["pp"], stage).sum()) - len(ranks)
    of = f"stage {stage[0]}" if len(stage) == 1 else f"its {len(stage)} stages"
    yield (
        f"{outlier.name} {REASONS[outlier.kind]} than its {peers} peers of {of}: {outlier.seconds:.4g} s a step, not "
        f"{outlier.peer_s:.4g} s, {outlier.score:.0f} deviations, since step {since}"
    )
    if outlier.node:
        yield f"most of the {len(ranks)} ranks of the node are slow ({format_ranks(outlier.ranks)})"
    if outlier.parts:
        yield "longer: " + ", ".join(f"{name} by {seconds * 1e3:.3g} ms" for name, seconds in outlier.parts)
    for axis in cube.axes:
        waits = cube.mean(cube.wait_of(axis))
        others = np.setdiff1d(np.flatnonzero(np.isin(cube.places.coords["pp"], stage)), ranks)
        mine, theirs = float(waits[ranks].mean()), float(np.median(waits[others])) if len(others) else 0.0
        if theirs - mine > 0.2 * (outlier.seconds - outlier.peer_s):
            yield f"it waits {mine * 1e3:.3g} ms a step for {axis}, its peers {theirs * 1e3:.3g} ms: they wait for it"


@dataclass(frozen=True)
class GcPauses:
    """Pauses of Python's garbage collector that cost the job. `ranks`: with most of the time; all ranks: empty."""

    ranks: tuple[int, ...]
    cost_s: float
    cost_share: float
    since: int
    evidence: tuple[str, ...]


def gc_pauses(cube: StepCube) -> GcPauses | None:
    """Return what pauses for garbage collection cost, if at least MIN_COST_SHARE of the steps' time. What all ranks
    pause in a step is a collection that the trainer has planned, and delays nobody else; of a single rank all counts.
    """
    pauses = cube.gc - cube.gc.min(0) if len(cube.gc) > 1 else cube.gc
    hit = np.flatnonzero(pauses.any(0))
    if len(hit) < MIN_PAUSED_STEPS or not cube.wall.any():
        return None
    cost = job_costs(cube, {"gc": Excess(np.arange(len(pauses)), pauses, "gc")}, np.asarray(cube.wall.any(0)))["gc"]
    step_s = float(cube.wall[cube.wall > 0].mean())
    if cost < MIN_COST_SHARE * step_s:
        return None
    by_rank = pauses.sum(1)
    most = np.flatnonzero(by_rank >= 0.5 * by_rank.sum())
    ranks = tuple(map(int, cube.places.rank[most])) if len(by_rank) > 2 else ()
    steps, of_ranks = len(hit) / len(cube.steps), int((by_rank > 0).sum())
    paused = f"{of_ranks} of {len(by_rank)} ranks" if len(by_rank) > 1 else "the rank"
    what = f"garbage collection pauses {paused}, in {steps:.0%} of the steps, by "
    evidence = [what + f"{1e3 * float(pauses[pauses > 0].mean()):.3g} ms"]
    if len(by_rank) > 1:
        evidence.append("ranks pause at different times, and all others wait for the one that pauses")
    return GcPauses(ranks, cost, cost / step_s, int(cube.steps[hit[0]]), tuple(evidence))


@dataclass(frozen=True)
class SlowGroup:
    """A group whose collectives take longer than those of the other groups along its axis."""

    axis: str
    operation: str
    ranks: tuple[int, ...]
    seconds: float
    peer_s: float
    cost_s: float

    @property
    def name(self) -> str:
        return f"{self.axis} group of {format_ranks(self.ranks)}"


def slow_groups(cube: StepCube) -> tuple[SlowGroup, ...]:
    """Return the groups with slow collectives, the costliest first.

    A group's transfer is the shortest wait of its ranks: the last one to enter waits for the network only. Peers are
    the groups along the axis that carry as many bytes.
    """
    found: list[SlowGroup] = []
    for at, part in enumerate(cube.parts):
        if part.axis in AXES and part.axis != "pp":
            code = cube.places.group_codes(part.axis)
            order = np.argsort(code, kind="stable")
            starts = np.flatnonzero(np.append(True, np.diff(code[order]) != 0))
            transfer = np.minimum.reduceat(cube.wait[order, :, at], starts)
            size = np.maximum.reduceat(cube.bytes[order, at], starts)
            members = np.split(cube.places.rank[order], starts[1:])
            found += _compare_groups(cube, part, transfer[:, cube.ordinary_steps], size, members)
    return tuple(sorted(found, key=lambda group: -group.cost_s))


def _compare_groups(
    cube: StepCube, part: Part, transfer: Floats, size: Floats, members: list[Integers]
) -> Iterator[SlowGroup]:
    """Yield the slow groups of an operation. `transfer` [groups, S], `size` [groups] in bytes."""
    order = np.argsort(size, kind="stable")
    ends = np.flatnonzero(np.diff(size[order]) > SAME_SIZE * size[order][:-1]) + 1
    for peers in np.split(order, ends):
        if len(peers) < MIN_GROUPS or not transfer.shape[1]:
            continue
        seconds, typical = transfer[peers].mean(1), lower_median(transfer[peers])
        peer_s = float(lower_median(seconds))
        spread = MAD_TO_DEVIATION * float(lower_median(np.abs(seconds - peer_s)))
        persistent = (transfer[peers] > (1 + MIN_GROUP_RATIO) / 2 * typical).mean(1) >= PERSISTENT
        least = max(MIN_SCORE * spread, MIN_COST_SHARE * cube.step_s, (MIN_GROUP_RATIO - 1) * peer_s)
        for at in np.flatnonzero(persistent & (seconds - peer_s >= least)):
            ranks, mine = tuple(map(int, members[peers[at]])), float(seconds[at])
            yield SlowGroup(part.axis, part.name, ranks, mine, peer_s, mine - peer_s)
