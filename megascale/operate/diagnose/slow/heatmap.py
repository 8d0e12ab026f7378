"""The heat map of a run: the time of each part of a step by rank beside its peers, and the outliers (paper, 5.1).

Peers are the ranks of the same pipeline stage, which do the same work: stages with the embedding or the head, and
uneven stages, are compared with themselves. Outliers are found in four sums: pauses, compute, data and host. A rank is
an outlier if its mean over the window exceeds the peers' median by MIN_SCORE deviations, by MIN_RATIO, and by MIN_SHARE
of the step, and if it also does in most blocks of the window (continuity). A rank with a single peer needs a larger
margin, because nothing tells how much two healthy ranks differ. A node is an outlier if most of its ranks are slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from megascale.operate.diagnose.slow.finding import SlowCulprit
from megascale.operate.diagnose.slow.job_cost import Excess, Model, job_costs, times_of
from megascale.operate.diagnose.slow.peers import (
    BLOCKS,
    MAD_TO_DEVIATION,
    MIN_SCORE,
    PERSISTENT_BLOCKS,
    Groups,
    deviation_of,
    lower_median,
    peer_median,
)
from megascale.operate.diagnose.slow.step_cube import OTHER, Floats, Integers, Part, StepCube
from megascale.operate.diagnose.slow.step_levels import MIN_EXPLAINED
from megascale.record.events import COMPUTE, HOST_AXIS, PAUSE

Kind = Literal["pause", "compute", "data", "host"]
KINDS: tuple[Kind, ...] = ("pause", "compute", "data", "host")

MIN_RATIO = 1.03  # smallest ratio to the peers' median
MIN_SHARE = 0.005  # smallest excess, as a share of the step

MIN_SCORE_OF_PAIR, MIN_RATIO_OF_PAIR, MIN_SHARE_OF_PAIR = 8.0, 1.08, 0.02
"""Deviations, ratio and excess of a rank with a single peer, whose deviation is known from ERROR_BLOCKS means only."""

MIN_STEPS = 8  # fewest steps of a window
ERROR_BLOCKS = 10  # blocks of a window whose means give its standard error
NOISE_FLOOR = 0.005  # smallest deviation of a mean, as a share of the median: less says nothing about a machine


@dataclass(frozen=True)
class Outlier:
    """A rank or a node that takes longer than its peers.

    `seconds`, `peer_s`: mean of a step, of the slowest rank and of its peers. `ratio`: of the culprit's median rank.
    `score`: deviations beyond the median. `parts`: parts that are longer, the largest excess first, with their excess
    in seconds. `cost_s`, `cost_share`: what the job loses in a step, in seconds and as a share (`job_cost`).
    """

    kind: Kind
    culprit: SlowCulprit
    seconds: float
    peer_s: float
    ratio: float
    score: float
    parts: tuple[tuple[str, float], ...]
    cost_s: float = 0.0
    cost_share: float = 0.0


@dataclass(frozen=True)
class HeatMap:
    """Means of the ordinary steps of a window. `seconds`, `peer_s` [R, C]: by rank and column.

    Columns are parts: actions by chunk and host activities with their own time, and by axis the wait for communication.
    """

    first_step: int
    last_step: int
    step_s: float
    ranks: Integers
    columns: tuple[str, ...]
    seconds: Floats
    peer_s: Floats
    outliers: tuple[Outlier, ...]

    @property
    def ratio(self) -> Floats:
        """Seconds over the peers' median, [R, C]; 1 where both are 0."""
        return np.divide(self.seconds, self.peer_s, out=np.ones_like(self.seconds), where=self.peer_s > 0)


def heat_map(cube: StepCube, usual: StepCube | None = None, lost_s: float = 0.0) -> HeatMap:
    """Compare all ranks over the ordinary steps of a window. If its steps lost `lost_s` seconds beside the `usual`
    ones, a rank whose excess grew by MIN_EXPLAINED of that is an outlier as well, also if only some of its steps are
    long.
    """
    names, kinds, values = zip(*_columns(cube), strict=True)
    shown = compare(cube, np.stack(values, 2))
    outliers = _find_outliers(cube, usual, lost_s) if len(cube.steps) >= MIN_STEPS else []
    found = []
    for outlier, cost in zip(outliers, job_costs(cube, [excess_of(cube, each) for each in outliers]), strict=True):
        ranks, cost_s = cube.places.index(np.array(outlier.culprit.ranks)), float(cost[cube.ordinary_steps].mean())
        excess = (shown.seconds - shown.peer_s)[ranks].mean(0)
        longer = [(name, float(more)) for name, kind, more in zip(names, kinds, excess, strict=True)
                  if kind == outlier.kind and more > 0]  # fmt: skip
        parts = tuple(sorted(longer, key=lambda part: -part[1])[:3])
        found.append(replace(outlier, parts=parts, cost_s=cost_s, cost_share=cost_s / max(cube.step_s, 1e-12)))
    found.sort(key=lambda outlier: -outlier.cost_s)
    first, last = (int(cube.steps[0]), int(cube.steps[-1])) if len(cube.steps) else (0, 0)
    return HeatMap(first, last, cube.step_s, cube.places.rank, names, shown.seconds, shown.peer_s, tuple(found))


def slowness(cube: StepCube) -> Floats:
    """Return each rank's excess over its peers' compute time, such as 0.1, [R]; NaN without ordinary steps."""
    compared = compare(cube, cube.compute[:, :, None])
    return (compared.seconds / np.maximum(compared.peer_s, 1e-12) - 1)[:, 0]


class PeerComparison(NamedTuple):
    """Means of a window beside the peers' median, and the deviation of the mean, each [R, C]."""

    seconds: Floats
    peer_s: Floats
    deviation: Floats

    @property
    def score(self) -> Floats:
        return (self.seconds - self.peer_s) / self.deviation


def compare(cube: StepCube, values: Floats) -> PeerComparison:
    """Compare the means of `values` [R, S, C] with the medians of peers: ranks of the same pipeline stage.

    Of an even number of peers the lower median counts. The deviation is the largest of: the MAD of the peers' means;
    the standard error of a peer's difference to the others, from means of blocks of steps, which depend less on each
    other than steps do; the noise floor. What makes steps longer for all peers, such as uneven work, is no error.
    """
    seconds, stage = cube.mean(values), cube.places.coords["pp"]
    peer_s, spread = peer_median(seconds, stage), np.zeros_like(seconds)
    mad = MAD_TO_DEVIATION * peer_median(np.abs(seconds - peer_s), stage)
    blocks = np.array_split(np.arange(len(cube.steps)), min(ERROR_BLOCKS, max(1, len(cube.steps))))
    means = np.stack([cube.take(block).mean(values[:, block]) for block in blocks], 1)  # [R, block, C]
    for mine in Groups.of(stage).members if len(blocks) > 1 else ():
        others = means[mine][::-1] if len(mine) == 2 else lower_median(means[mine])
        spread[mine] = lower_median(_standard_error(means[mine] - others))
    floor = np.maximum(NOISE_FLOOR * np.abs(peer_s), 1e-4 * cube.step_s + 1e-12)
    return PeerComparison(seconds, peer_s, np.fmax(np.fmax(mad, spread), floor))


def _standard_error(means: Floats) -> Floats:
    """Return the standard error of the mean of blocks [R, block, C] that are known; NaN for fewer than two."""
    known = ~np.isnan(means)
    count = known.sum(1)
    mean = np.where(known, means, 0.0).sum(1) / np.maximum(1, count)
    squares = np.where(known, (means - mean[:, None]) ** 2, 0.0).sum(1)
    return np.asarray(np.sqrt(squares / np.where(count > 1, (count - 1) * count, np.nan)))


def _columns(cube: StepCube) -> Iterator[tuple[str, Kind | None, Floats]]:
    """Yield the columns: name, kind of the outliers that they explain, and times [R, S]."""
    for at, part in enumerate(cube.parts):
        if part.axis == COMPUTE:
            yield str(part), "compute", cube.own[:, :, at]
        elif part.axis == HOST_AXIS and part.name not in ("gc", "evaluation", "checkpoint"):
            yield str(part), "host" if part.name == PAUSE else "data", cube.own[:, :, at]
    yield str(Part(HOST_AXIS, OTHER)), "host", cube.other
    for axis in cube.axes:
        yield f"{axis} wait", None, cube.wait_of(axis)


def _sums(cube: StepCube) -> Floats:
    """Return the times by KINDS, and the sum but for pauses, [R, S, 5]."""
    own = cube.compute, cube.data, cube.other
    return np.stack([cube.paused, *own, sum(own)], 2)


def _find_outliers(cube: StepCube, usual: StepCube | None, lost_s: float) -> list[Outlier]:
    """Return outliers by KINDS, without their parts and costs; a slow node in place of its ranks."""
    sums, stage = _sums(cube), cube.places.coords["pp"]
    whole, pair = compare(cube, sums), (np.bincount(stage)[stage] == 2)[:, None]  # ranks with a single peer
    least = np.maximum(
        (np.where(pair, MIN_RATIO_OF_PAIR, MIN_RATIO) - 1) * whole.peer_s,
        np.where(pair, MIN_SHARE_OF_PAIR, MIN_SHARE) * cube.step_s,
    )
    excess = whole.seconds - whole.peer_s
    shows = np.zeros(excess.shape, int)
    for block in np.array_split(np.arange(len(cube.steps)), BLOCKS):
        part = cube.take(block)
        seconds, peer_s, _ = compare(part, sums[:, block])
        shows += seconds - peer_s >= least / 2
    lasting = shows >= PERSISTENT_BLOCKS
    slow = ((whole.score >= np.where(pair, MIN_SCORE_OF_PAIR, MIN_SCORE)) & (excess >= least) & lasting)[
        :, : len(KINDS)
    ]
    if usual is not None:
        before = compare(usual, _sums(usual))
        grown = excess - np.nan_to_num(before.seconds - before.peer_s)
        lost = (grown >= np.maximum(MIN_EXPLAINED * lost_s, least)) & lasting
        slow[lost[:, 0], 0] = True
        slow[lost[:, -1], 1 + grown[lost[:, -1], 1 : len(KINDS)].argmax(1)] = True
    found = []
    for at, kind in enumerate(KINDS):
        ranks, column = np.flatnonzero(slow[:, at]), PeerComparison(*(array[:, at] for array in whole))
        for node, members in _slow_nodes(
            cube, excess[:, at] / np.maximum(np.maximum(whole.peer_s, least)[:, at], 1e-12)
        ):
            middle = excess[members, at] >= least[members, at]
            if middle.mean() > 0.5 and np.median(shows[members, at]) >= PERSISTENT_BLOCKS:
                found.append(_outlier(cube, kind, members, cube.places.nodes[node], column))
                ranks = np.setdiff1d(ranks, members)
        found += [_outlier(cube, kind, np.array([rank]), "", column) for rank in ranks]
    return found


def _slow_nodes(cube: StepCube, relative: Floats) -> Iterator[tuple[int, Integers]]:
    """Yield the nodes of several ranks whose median rank is an outlier among all nodes, and their ranks' positions.
    `relative` [R]: excess over the peers' median.
    """
    members = Groups.of(cube.places.node).members
    several = [ranks for ranks in members if len(ranks) > 1]
    if len(members) < 2 or not several:
        return
    medians = np.array([lower_median(relative[ranks]) for ranks in several])
    middle = lower_median(medians)
    deviation = max(deviation_of(medians - middle), NOISE_FLOOR)
    for ranks, median in zip(several, medians, strict=True):
        if (median - middle) / deviation >= MIN_SCORE and median - middle >= MIN_RATIO - 1:
            yield int(cube.places.node[ranks[0]]), ranks


def _outlier(cube: StepCube, kind: Kind, members: Integers, node: str, values: PeerComparison) -> Outlier:
    known = members[~np.isnan(values.seconds[members])]
    slowest = known[np.argmax(values.seconds[known] - values.peer_s[known])]
    ratio = np.median(values.seconds[known] / np.maximum(values.peer_s[known], 1e-9))
    return Outlier(
        kind, SlowCulprit.of_ranks(cube.places.rank[members], node), float(values.seconds[slowest]),
        float(values.peer_s[slowest]), float(ratio), float(np.median(values.score[known])), (),
    )  # fmt: skip


def excess_of(cube: StepCube, outlier: Outlier) -> Excess:
    """Return by how much an outlier's ranks exceed their peers in each step: without its fault a rank is like them."""
    ranks, stage = cube.places.index(np.array(outlier.culprit.ranks)), cube.places.coords["pp"]
    times: dict[Model, Floats] = {"compute": cube.other} if outlier.kind == "host" else times_of(cube)
    of_kind: dict[Kind, tuple[Model, ...]] = {"pause": ("gc",), "data": ("data",)}
    parts = times.keys() & of_kind.get(outlier.kind, ("compute", "optimizer"))
    return Excess(ranks, {part: (times[part] - peer_median(times[part], stage))[ranks] for part in parts})
