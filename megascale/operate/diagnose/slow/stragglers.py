"""The suspects of a slow run: ranks and nodes, pauses for garbage collection, and groups with slow collectives.

In a synchronous job a slow rank waits less than its peers, and everybody else waits for it: waits are evidence, never
the verdict. `stragglers` compares own times (`slow.heatmap`) in the stretches of a run. A cause that slows all ranks
alike names nobody.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megascale.core.rank import format_ranks
from megascale.layout.topology import EXPERT_AXES
from megascale.operate.diagnose.slow.finding import JOB, SlowCause, SlowCulprit
from megascale.operate.diagnose.slow.heatmap import MIN_STEPS, Kind, Outlier, excess_of, heat_map
from megascale.operate.diagnose.slow.job_cost import Excess, job_costs
from megascale.operate.diagnose.slow.peers import MIN_SCORE, Groups, deviation_of, lower_median
from megascale.operate.diagnose.slow.step_cube import Floats, Integers, StepCube
from megascale.operate.diagnose.slow.step_levels import MIN_REST_SHARE, StepLevels

MIN_GROUP_RATIO, MIN_GROUP_SHARE = 1.5, 0.01
"""Smallest ratio of a slow group's transfer to its peers', and its smallest excess, as a share of the step."""

MIN_PAUSED_SHARE = 0.02  # smallest share of the steps with a pause of some ranks: rarer ones are planned, or no habit
SAME_SIZE = 0.1  # largest relative difference in bytes between a group and its next larger peer
PERSISTENT = 0.8  # share of the steps in which a slow group is slow

REASONS: dict[Kind, str] = {
    "pause": "stands still longer (stopped, frozen, or without a core)",
    "compute": "computes longer", "data": "reads its data longer", "host": "is longer outside of recorded actions",
}  # fmt: skip


def stragglers(cube: StepCube, levels: StepLevels) -> Iterator[SlowCause]:
    """Yield the ranks and nodes that are slower than their peers in a stretch."""
    found: dict[tuple[Kind, SlowCulprit], list[tuple[int, Outlier]]] = {}
    for number, stretch in enumerate(levels.stretches):
        now, usual = (cube.take(cube.within(ends)) for ends in (stretch[:2], stretch.usual))
        lost = stretch.lost_s >= MIN_REST_SHARE * stretch.seconds and len(usual.steps) >= MIN_STEPS
        for outlier in heat_map(now, usual if lost else None, stretch.lost_s).outliers:
            found.setdefault((outlier.kind, outlier.culprit), []).append((number, outlier))
    nodes = {(kind, rank): who for kind, who in found if who.nodes for rank in who.ranks}
    joined: dict[tuple[Kind, SlowCulprit], list[tuple[int, Outlier]]] = {}
    for (kind, who), seen in found.items():  # a rank counts as its node, if that is slow in another stretch
        joined.setdefault((kind, nodes.get((kind, who.ranks[0]), who)), []).extend(seen)
    worst = {key: max((one for _, one in seen), key=lambda one: (bool(one.culprit.nodes), one.cost_s))
             for key, seen in joined.items()}  # fmt: skip
    worst = dict(sorted(worst.items(), key=lambda item: item[0][0] != "pause"))  # pauses explain other times
    costs = job_costs(cube, [excess_of(cube, outlier) for outlier in worst.values()])
    for (key, outlier), seconds in zip(worst.items(), costs, strict=True):
        numbers = [number for number, _ in joined[key]]
        last, newest = max(joined[key], key=lambda seen: seen[0])
        evidence = tuple(_evidence(cube.take(cube.within(levels.stretches[last][:2])), newest))
        yield SlowCause(outlier.kind, outlier.culprit, seconds, frozenset(numbers), evidence)


def _evidence(cube: StepCube, outlier: Outlier) -> Iterator[str]:
    who = outlier.culprit
    ranks = cube.places.index(np.array(who.ranks))
    stage = np.unique(cube.places.coords["pp"][ranks])
    peers = int(np.isin(cube.places.coords["pp"], stage).sum()) - len(ranks)
    of = f"stage {stage[0]}" if len(stage) == 1 else f"its {len(stage)} stages"
    yield (
        f"{who} {REASONS[outlier.kind]} than its {peers} peer{'s' * (peers != 1)} of {of}: "
        f"{outlier.seconds:.4g} s a step, "
        + (f"not {outlier.peer_s:.4g} s, {outlier.score:.0f} deviations" if outlier.peer_s else "they do not")
    )
    if who.nodes:
        yield f"most of the {len(ranks)} ranks of the node are slow ({format_ranks(who.ranks)})"
    if outlier.parts:
        yield "longer: " + ", ".join(f"{name} by {seconds * 1e3:.3g} ms" for name, seconds in outlier.parts)
    for axis in cube.axes:
        waits = cube.mean(cube.wait_of(axis))
        others = np.setdiff1d(np.flatnonzero(np.isin(cube.places.coords["pp"], stage)), ranks)
        others = others[np.isfinite(waits[others])]
        mine, theirs = float(np.nanmean(waits[ranks])), float(np.median(waits[others])) if len(others) else 0.0
        if theirs - mine > 0.2 * (outlier.seconds - outlier.peer_s):
            yield f"it waits {mine * 1e3:.3g} ms a step for {axis}, its peers {theirs * 1e3:.3g} ms: they wait for it"


def gc_pauses(cube: StepCube, levels: StepLevels) -> Iterator[SlowCause]:
    """Yield the pauses of Python's garbage collector that are not planned. A pause of all ranks in one step is planned,
    by the trainer, and delays nobody else, unless most steps have one. A rank with most of the time is named.
    """
    of_all = (cube.gc > 0).all(0) & (len(cube.gc) > 1)
    pauses = np.where(of_all & (of_all.mean() <= 0.5), 0.0, cube.gc)
    hit, by_rank = np.asarray(pauses.any(0)), pauses.sum(1)
    times = enumerate(cube.within(stretch[:2]) for stretch in levels.stretches)
    seen = {number for number, now in times if now.any() and hit[now].mean() >= MIN_PAUSED_SHARE}
    if not seen or hit.mean() < MIN_PAUSED_SHARE:
        return
    most = np.flatnonzero(by_rank >= 0.5 * by_rank.sum())
    who = SlowCulprit.of_ranks(cube.places.rank[most]) if len(most) and len(by_rank) > 2 else JOB
    paused = f"{(by_rank > 0).sum()} of {len(by_rank)} ranks" if len(by_rank) > 1 else "the rank"
    what = f"garbage collection pauses {paused}, in {hit.mean():.0%} of the steps, by "
    evidence = [what + f"{1e3 * float(pauses[pauses > 0].mean()):.3g} ms"]
    if len(by_rank) > 1:
        evidence.append("ranks pause at different times, and all others wait for the one that pauses")
    (costs,) = job_costs(cube, [Excess(np.arange(len(pauses)), {"gc": pauses})])
    yield SlowCause("gc", who, costs, frozenset(seen), tuple(evidence))


def slow_groups(cube: StepCube, levels: StepLevels) -> Iterator[SlowCause]:
    """Yield the groups with slow collectives: those of a name together.

    A group's transfer is the shortest wait of its ranks: the last one to enter waits for the network only. Peers are
    the groups of its name that carry as many bytes; a group without peers is compared with its usual steps.
    """
    names = [part.group_name or part.axis for part in cube.parts]
    for name in dict.fromkeys(name for name in names if name.partition(".")[0] in ("tp", "cp", "dp", *EXPERT_AXES)):
        groups, parts = Groups.of(cube.places.group_codes(name)), [at for at, of in enumerate(names) if of == name]
        transfer = groups.reduce(np.minimum, cube.wait[:, :, parts]).sum(2)
        size = groups.reduce(np.maximum, cube.bytes[:, parts]).sum(1)
        members = [cube.places.rank[at] for at in groups.members]
        order = np.argsort(size, kind="stable")
        for peers in np.split(order, np.flatnonzero(np.diff(size[order]) > SAME_SIZE * size[order][:-1]) + 1):
            yield from _slow_groups(cube, levels, name, transfer[peers], [members[peer] for peer in peers])


def _slow_groups(
    cube: StepCube, levels: StepLevels, name: str, transfer: Floats, members: list[Integers]
) -> Iterator[SlowCause]:
    """Yield the slow ones of groups that do the same. `transfer` [groups, S]."""
    usual = lower_median(transfer) if len(members) > 1 else np.zeros(len(cube.steps))
    seen, slow, evidence = set[int](), np.zeros(len(members), bool), ""
    for number, stretch in enumerate(levels.stretches):
        now, before = (cube.within(ends) for ends in (stretch[:2], stretch.usual))
        if not now.any() or (len(members) == 1 and not before.any()):
            continue
        peers = usual[now] if len(members) > 1 else np.full(now.sum(), transfer[0, before].mean())
        seconds, peer_s = transfer[:, now].mean(1), float(peers.mean())
        spread = deviation_of(seconds - peer_s) if len(members) > 1 else 0.0
        persistent = (transfer[:, now] > (1 + MIN_GROUP_RATIO) / 2 * peers).mean(1) >= PERSISTENT
        least = max(MIN_SCORE * spread, MIN_GROUP_SHARE * stretch.seconds, (MIN_GROUP_RATIO - 1) * peer_s)
        here = persistent & (seconds - peer_s >= least)
        if here.any():
            seen, slow = seen | {number}, slow | here
            evidence = (f"even the last rank to enter waits {seconds[here].max() * 1e3:.3g} ms a step for {name}, "
                        f"{'in other groups' if len(members) > 1 else 'before'} {peer_s * 1e3:.3g} ms")  # fmt: skip
    if seen:
        mine = [members[at] for at in np.flatnonzero(slow)]
        ranks = tuple(sorted(int(rank) for group in mine for rank in group))
        who = SlowCulprit("group", ranks, axis=name, groups=len(mine)) if len(ranks) < len(cube.places.rank) else JOB
        hint = "`megascale doctor nodes` measures the links between the nodes of a group"
        yield SlowCause("communication", who, (transfer - usual)[slow].max(0), frozenset(seen), (evidence, hint))
