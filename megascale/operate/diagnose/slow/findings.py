"""The causes that slow a run down, in plain words: the findings of all analyses, each cause once.

`findings` reads an event store, `combine` decides: what the steps lost is measured against the job's own steps before
(`slow.step_levels`), and the suspects of all analyses share it: the model (`slow.job_cost`) says which of them lost
more. Where there are no steps before the onset, the model's seconds are all that is known. What no suspect explains
concerns all ranks. A cause that costs less than the run's steps vary is no finding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megascale.operate.diagnose.slow.cube_queries import recent_cube, recent_messages, sampled_cube
from megascale.operate.diagnose.slow.drift import entry_spread
from megascale.operate.diagnose.slow.expert_loads import imbalance, recent_loads
from megascale.operate.diagnose.slow.finding import JOB, Finding, FindingKind, SlowCause, SlowCulprit
from megascale.operate.diagnose.slow.peers import lower_median
from megascale.operate.diagnose.slow.slow_links import slow_links
from megascale.operate.diagnose.slow.step_cube import Booleans, Columns, Floats, Places, StepCube
from megascale.operate.diagnose.slow.step_levels import (
    MAX_EXCESS,
    MIN_EXPLAINED,
    MIN_REST_SHARE,
    StepLevels,
    Stretch,
    excess_seconds,
    shifts_of,
    step_levels,
)
from megascale.operate.diagnose.slow.stragglers import gc_pauses, slow_groups, stragglers
from megascale.record.events import COMPUTE

if TYPE_CHECKING:
    import duckdb

MIN_COST_SHARE = 0.005  # smallest share of a step that a cause costs to be named
MIN_COST_NOISE = 2.0  # smallest cost of a cause, in deviations of the mean of a block of like steps: below, it is noise

MIN_CROWDED_SHARE, MIN_UNMEASURED_SHARE = 0.25, 0.5
"""Smallest cost of a cause that names ranks which share their host's cores, as a share of the job's own steps before,
and without such steps, of a step; also of ranks without peers. What ranks take from each other is smaller.
"""

MIN_LASTING = 0.5  # share of its cost that a cause costs as long as it lasts
MIN_DATA_SHARE = 0.05  # smallest share of a step in which the ranks that read data do nothing else, to be named
MIN_SLOW_STEPS_SHARE = 0.01  # smallest share of the time that single slow steps cost to be named
MAX_SLOW_STEPS = 0.2  # largest share of slow steps: with more, steps vary for a reason that the prediction lacks

CAUSES: dict[FindingKind, tuple[FindingKind, ...]] = {
    "compute": ("pause",), "data": ("pause",), "host": ("pause",), "link": ("pause", "compute", "host"),
    "communication": ("link", "pause", "compute", "host"),
}  # fmt: skip
"""Kinds of causes by the kind of their effects on the same ranks."""

Costs = dict[Stretch, float]
"""Seconds of a step that a cause costs, by stretch, in order."""


def findings(store: duckdb.DuckDBPyConnection) -> list[Finding]:
    """Return the findings about a run's store (`store.query.open_store`): those that go on first, and the
    costliest of them; then those without a known cost.
    """
    cube = recent_cube(store)
    first = int(cube.steps.min(initial=np.iinfo(np.int32).max))  # earlier ones are old, or ranks were on other nodes
    return [*combine(cube, sampled_cube(store), recent_messages(store, first)), *imbalance(recent_loads(store))]


def crowd_note(places: Places) -> str:
    """Return a note on ranks with shared cores and its effect; "" without any."""
    hosts = [f"{ranks} ranks share {cores} core{'s' * (cores != 1)} of {host}" for host, ranks, cores in places.crowded]
    if not hosts:
        return ""
    more = f" and {len(hosts) - 1} more hosts" if len(hosts) > 1 else ""
    least = f"{MIN_CROWDED_SHARE:.0%} of the steps before it, or {MIN_UNMEASURED_SHARE:.0%} of a step since the first"
    least += ", or for slow collectives"
    return f"{hosts[0]}{more}: they slow each other down; none is named for a cost below {least}"


def combine(cube: StepCube, sample: StepCube, events: Columns) -> list[Finding]:
    """Return the findings about the newest steps of all ranks. `sample`: of the whole run; `events`: messages."""
    levels = step_levels(cube, sample)
    if not levels.stretches or not len(cube.places.rank):
        return []
    suspects = list(_large(cube, levels, _suspects(cube, levels, events), crowded=False))
    if suspects:  # their onsets are cuts, too
        like = np.flatnonzero(cube.ordinary_steps)
        shifts = {at for suspect in suspects for at in shifts_of(suspect.seconds[like])}
        levels = step_levels(cube, sample, cube.steps[like[sorted(shifts)]].tolist())
    large = list(_large(cube, levels, _suspects(cube, levels, events), crowded=bool(cube.places.crowded)))
    shares, rest = _divide(cube, levels, large)
    found = [_finding(levels, suspect, costs) for suspect, costs in zip(large, shares, strict=True)]
    noise_s = levels.noise_s(cube.steps, sum((suspect.seconds for suspect in large), np.zeros(len(cube.steps))))
    found += _rest(cube.places, sample, levels, rest, noise_s)
    found += _data_of_all(cube, levels, found)
    found += [] if found else _single_steps(cube, noise_s)
    return sorted(found, key=lambda finding: (finding.until is not None, -finding.cost_s))


def _share_cores(places: Places, suspect: SlowCause) -> bool:
    """Return True for slow collectives of ranks of one node with shared cores: whoever waits there needs a core to
    notice the end of its wait, in whatever group.
    """
    if suspect.kind != "communication" or not places.crowded:
        return False
    ranks = places.index(np.array(suspect.culprit.ranks)) if suspect.culprit.ranks else slice(None)
    return len(np.unique(places.node[ranks])) == 1


def _large(cube: StepCube, levels: StepLevels, suspects: Sequence[SlowCause], *, crowded: bool) -> Iterator[SlowCause]:
    """Yield the suspects that cost enough to be named, from the first to the last stretch with MIN_LASTING of their
    mean cost. `crowded`: ranks share cores.
    """
    shares, _ = _divide(cube, levels, suspects)
    for suspect, costs in zip(suspects, shares, strict=True):
        most = [at for at, cost_s in enumerate(costs.values()) if cost_s >= MIN_LASTING * _mean_cost(costs)]
        core, noise_s = slice(min(most), max(most) + 1), levels.noise_s(cube.steps, suspect.seconds)
        if _is_large(dict([*costs.items()][core]), noise_s, crowded=crowded and bool(suspect.culprit.ranks)):
            yield replace(suspect, seen=frozenset(sorted(suspect.seen)[core]))


def _finding(levels: StepLevels, cause: SlowCause, costs: Costs) -> Finding:
    (first, *_), last = costs, next(reversed(costs))
    until = None if last == levels.stretches[-1] else last.last
    cost_s, step_s = _mean_cost(costs), float(np.mean([stretch.seconds for stretch in costs]))
    return Finding(cause.kind, cause.culprit, first.first, until, cost_s, cost_s / step_s, cause.evidence)


def _suspects(cube: StepCube, levels: StepLevels, events: Columns) -> list[SlowCause]:
    """Return the suspects without those that another explains: what a slow rank sends is late, and a slow link makes
    the collectives of its ranks slow.
    """
    kept: list[SlowCause] = []
    for suspect in (
        *stragglers(cube, levels), *slow_links(cube, levels, events), *slow_groups(cube, levels),
        *gc_pauses(cube, levels),
    ):  # fmt: skip
        cause = next((at for at, other in enumerate(kept) if _explains(cube, levels, other, suspect)), None)
        if cause is None:
            kept.append(suspect)
        elif suspect.kind == "communication" and kept[cause].kind == "link":
            kept[cause] = _link_of_group(cube.places, kept[cause], suspect)
    kept = [suspect for suspect in kept if not _share_cores(cube.places, suspect)]
    return [_lasting(cube, levels, suspect) for suspect in kept]


def _explains(cube: StepCube, levels: StepLevels, cause: SlowCause, suspect: SlowCause) -> bool:
    """Return True if a suspect is the effect of another, in the stretches in which both show. A slow rank has an effect
    of its own size; a slow link may show little itself.
    """
    kinds = CAUSES.get(suspect.kind, ())
    both = suspect.seen & cause.seen
    suspected = suspect.culprit.ranks or cause.culprit.ranks
    if cause.kind not in kinds or not both or set(suspected).isdisjoint(cause.culprit.ranks):
        return False
    steps = np.logical_or.reduce([cube.within(levels.stretches[number][:2]) for number in both])
    size, of_suspect = (float(each.seconds[steps].mean()) for each in (cause, suspect))
    return cause.kind == "link" or size >= MIN_EXPLAINED * of_suspect


def _link_of_group(places: Places, link: SlowCause, group: SlowCause) -> SlowCause:
    """Return a slow link with the slow collectives of its ranks: of its ends, the only node that the group has."""
    ranks = (np.array(each.culprit.ranks) for each in (link, group))
    of_link, of_group = (set(places.node[places.index(each)].tolist()) for each in ranks)
    both = of_link & of_group
    if group.culprit.ranks and len(both) == 1 < len(of_link):
        node = both.pop()
        own = [rank for rank in link.culprit.ranks if places.node[places.index(np.array(rank))] == node]
        link = replace(link, culprit=SlowCulprit.of_ranks(own, places.nodes[node]))
    evidence = (*link.evidence, f"{group.culprit}: {group.evidence[0]}")
    return replace(link, seconds=link.seconds + group.seconds, seen=link.seen | group.seen, evidence=evidence)


def _rest(places: Places, sample: StepCube, levels: StepLevels, rest: Costs, noise_s: float) -> Iterator[Finding]:
    """Yield what the newest steps lost that no suspect explains: by what grew, on which stages of `places`."""
    went_on: Costs = {}
    for stretch, cost_s in reversed(rest.items()):
        if cost_s < max(MIN_REST_SHARE * stretch.seconds, MIN_COST_NOISE * noise_s):
            break
        went_on = {stretch: cost_s} | went_on
    if went_on:
        (first, *_), newest = went_on, next(reversed(went_on))
        kind, stages, evidence = _what_grew(sample, levels, (first.first, newest.last), newest, _mean_cost(went_on))
        mine = np.isin(places.coords["pp"], stages)
        ranks, nodes = places.rank[mine], np.unique(places.node[mine])
        who = SlowCulprit.of_ranks(ranks, places.nodes[nodes[0]] if len(nodes) == 1 < len(ranks) else "")
        if len(nodes) > 1 == len(stages):
            who = SlowCulprit("stage", who.ranks, stage=stages[0])
        crowded = bool(len(ranks) and places.crowded)
        if crowded and not _is_large(went_on, noise_s, crowded=True, has_peers=False):
            kind = "job"
        if kind == "job" or not len(ranks):
            who = JOB
        yield _finding(levels, SlowCause(kind, who, np.zeros(0), frozenset(), evidence), went_on)


def _what_grew(
    sample: StepCube, levels: StepLevels, ends: tuple[int, int], newest: Stretch, cost_s: float
) -> tuple[FindingKind, list[int], tuple[str, ...]]:
    """Return what grew most in some steps beside the usual ones, on which stages, and the evidence. No stage is named
    for a growth that explains little of `cost_s`, nor are most of them.

    Stages are compared with their own past, for mean work: ranks of one stage have peers, which did not differ.
    """
    like = sample.take(np.isin(sample.steps, levels.steps))
    work = levels.work[np.searchsorted(levels.steps, like.steps)]
    now, before = like.within(ends), like.within(newest.usual)
    parts: dict[FindingKind, np.ndarray] = {
        "job": like.compute / work, "data": like.data / work, "host": like.other / work,
    }  # fmt: skip
    stage = sample.places.coords["pp"]
    stages, growths = np.unique(stage), dict[FindingKind, np.ndarray]()
    for kind, values in parts.items() if now.any() and before.any() else ():
        of_stage = np.stack([lower_median(values[stage == at]) for at in stages])
        growths[kind] = of_stage[:, now].mean(1) - of_stage[:, before].mean(1)
    first, last = newest.usual
    lines = [f"a step takes {newest.seconds:.3g} s, in steps {first} to {last} {newest.usual_s:.3g} s"]
    spread = entry_spread(sample, newest.usual_s or 0.0)
    lines += [spread.to_text()] if spread else []
    kind = max(growths, key=lambda each: float(growths[each].max()), default="drift")
    if not growths or growths[kind].max() < MIN_REST_SHARE * newest.seconds:
        return "drift", [], tuple(lines)
    most = growths[kind] >= growths[kind].max() / 2
    names = {"job": COMPUTE, "data": "reading data", "host": "time outside of actions"}
    lines += [f"{names[of]} grew by {float(growth.max()) * 1e3:.3g} ms a step" for of, growth in growths.items()
              if growth.max() >= MIN_REST_SHARE * newest.seconds]  # fmt: skip
    if most.mean() > 0.5 or growths[kind].max() < MIN_EXPLAINED * cost_s:
        return kind, [], tuple(lines)
    return "compute" if kind == "job" else kind, stages[most].tolist(), tuple(lines)


def _data_of_all(cube: StepCube, levels: StepLevels, found: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the reading of data, if it takes long on the median of the ranks that read."""
    newest = levels.stretches[-1]
    seconds = cube.data[:, cube.within(newest[:2])]
    reading = seconds[seconds.any(1)]
    if reading.size and not any(finding.kind == "data" for finding in found):
        typical = float(np.median(reading.mean(1)))
        if typical >= MIN_DATA_SHARE * newest.seconds:
            line = f"a rank reads its batch for {typical:.3g} s of a step of {newest.seconds:.3g} s, in the median"
            share = typical / newest.seconds
            yield Finding("data", JOB, int(cube.steps[0]), None, typical, share, (line,))


def _single_steps(cube: StepCube, noise_s: float) -> Iterator[Finding]:
    """Yield the steps that take longer than their work predicts, if they cost much."""
    wall, ordinary = cube.wall.mean(0, dtype=np.float64), np.asarray(cube.ordinary.all(0))
    excess = excess_seconds(cube.tokens, cube.flops, wall, ordinary)
    slow = excess > 0
    cost_s, share = float(excess.mean()), float(excess.sum() / max(wall.sum(), 1e-12))
    if share < MIN_SLOW_STEPS_SHARE or cost_s < MIN_COST_NOISE * noise_s or not 0 < slow.mean() <= MAX_SLOW_STEPS:
        return
    worst = int(np.argmax(excess))
    grown = (cube.own - np.median(cube.own, 1, keepdims=True))[:, worst] * [not part.is_wait for part in cube.parts]
    rank, part = np.unravel_index(int(np.argmax(grown)), grown.shape)
    numbers = [str(number) for number in cube.steps[slow]]
    where = "" if cube.places.crowded else f" on rank {cube.places.rank[rank]}"
    evidence = (
        f"{len(numbers)} of {len(wall)} steps take {MAX_EXCESS:.0%} longer than their tokens and FLOPs predict: "
        f"{', '.join(numbers[:8])}{', ...' if len(numbers) > 8 else ''}",
        f"step {cube.steps[worst]} takes {wall[worst]:.3g} s; what grew most is {cube.parts[part]}{where}, by "
        f"{float(grown[rank, part]):.3g} s",
    )
    yield Finding("steps", JOB, int(cube.steps[slow][0]), None, cost_s, share, evidence)


def _lasting(cube: StepCube, levels: StepLevels, suspect: SlowCause) -> SlowCause:
    """Return a suspect that is also seen in the stretches next to those in which it shows, as long as it costs
    MIN_LASTING of what it does there: a short stretch, or one without messages in the store, does not show it.
    """
    costs = [_mean(suspect.seconds, cube.within(stretch[:2])) for stretch in levels.stretches]
    seen, numbers = set(suspect.seen), range(len(costs))
    for before, number in (*itertools.pairwise(numbers), *itertools.pairwise(reversed(numbers))):
        if before in seen and costs[number] >= max(MIN_LASTING * costs[before], 1e-12):
            seen.add(number)
    return replace(suspect, seen=frozenset(seen))


def _is_large(costs: Costs, noise_s: float, *, crowded: bool, has_peers: bool = True) -> bool:
    """Return True if a cause costs enough to be named. `crowded`: it names ranks that share cores; `has_peers`: others
    that do the same do not lose as much.
    """
    cost_s = _mean_cost(costs)
    step_s = float(np.mean([each.seconds if each.usual_s is None else each.usual_s for each in costs]))
    least = MIN_COST_SHARE
    if crowded:
        measured = has_peers and all(each.usual_s is not None for each in costs)
        least = MIN_CROWDED_SHARE if measured else MIN_UNMEASURED_SHARE
    return cost_s >= max(least * step_s, MIN_COST_NOISE * noise_s)


def _mean_cost(costs: Costs) -> float:
    weights = [stretch.last - stretch.first + 1 for stretch in costs]
    return float(np.average([*costs.values()], weights=weights))


def _divide(cube: StepCube, levels: StepLevels, suspects: Sequence[SlowCause]) -> tuple[list[Costs], Costs]:
    """Divide what was lost: return the costs of each suspect, in the stretches in which it shows, and what is left.

    A suspect costs what it did in the usual steps, if it showed there, and its part of the loss since then, in
    proportion to what grew by the model. Without usual steps it costs what the model says, at most the step.
    """
    shares: list[Costs] = [{} for _ in suspects]
    rest: Costs = {}
    for number, stretch in enumerate(levels.stretches):
        now, before = (cube.within(ends) for ends in (stretch[:2], stretch.usual))
        here = [at for at, suspect in enumerate(suspects) if number in suspect.seen]
        old = {at: _mean(suspects[at].seconds, before) for at in here}
        grown = {at: max(0.0, _mean(suspects[at].seconds, now) - old[at]) for at in here}
        whole, most = sum(grown.values()), stretch.seconds if stretch.usual_s is None else stretch.lost_s
        least = MIN_EXPLAINED * most if stretch.usual_s is not None else 0.0
        scale = most / whole if whole > most or (whole >= least and stretch.usual_s is not None and whole) else 1.0
        for at in here:
            earlier = (levels.stretches[one].last for one in suspects[at].seen)
            lasts = any(stretch.usual[0] <= last <= stretch.usual[1] for last in earlier)
            shares[at][stretch] = scale * grown[at] + (max(0.0, old[at]) if lasts else 0.0)
        rest[stretch] = max(0.0, stretch.lost_s - scale * whole)
    return shares, rest


def _mean(seconds: Floats, steps: Booleans) -> float:
    return float(seconds[steps].mean()) if steps.any() else 0.0
