"""The heat map of a run: the time of each part of a step by rank beside its peers, and the outliers (paper, 5.1).

Peers are the ranks of the same pipeline stage, which do the same work: stages with the embedding or the head, and
uneven stages, are compared with themselves. Outliers are found in four sums: pauses, compute, data and host. A rank is
an outlier if its mean over the window exceeds the peers' median by MIN_SCORE deviations, by MIN_RATIO, and by MIN_SHARE
of the step, and if it also does in most blocks of the window (continuity). A rank with a single peer needs a larger
margin, because nothing tells how much two healthy ranks differ. A node is an outlier if most of its ranks are slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from megascale.operate.diagnose.slow.job_cost import MIN_EXPLAINED, Excess, Model, job_costs, times_of
from megascale.operate.diagnose.slow.step_cube import (
    MAD_TO_DEVIATION,
    OTHER,
    Booleans,
    Floats,
    Integers,
    Part,
    StepCube,
    lower_median,
)
from megascale.record.events import COMPUTE, HOST_AXIS, PAUSE

Kind = Literal["pause", "compute", "data", "host"]
KINDS: tuple[Kind, ...] = ("pause", "compute", "data", "host")

MIN_SCORE = 5.0
"""Deviations beyond the median: of 12,288 healthy ranks with Gaussian noise none in 99.6% of all windows."""

MIN_RATIO = 1.03
"""Smallest ratio to the peers' median."""

MIN_SHARE = 0.005
"""Smallest excess, as a share of the step."""

MIN_SCORE_OF_PAIR, MIN_RATIO_OF_PAIR, MIN_SHARE_OF_PAIR = 8.0, 1.08, 0.02
"""Deviations, ratio and excess of a rank with a single peer, whose deviation is known from ERROR_BLOCKS means only."""

BLOCKS, PERSISTENT_BLOCKS = 5, 4
"""Blocks of a window, and blocks in which an outlier shows at least half of the smallest excess."""

ERROR_BLOCKS = 10
"""Blocks of a window whose means give its standard error."""

MIN_STEPS = 8
"""Fewest steps of a window."""

NOISE_FLOOR = 0.005
"""Smallest deviation of a mean, as a share of the median: below, differences say nothing about a machine."""


@dataclass(frozen=True)
class Outlier:
    """A rank or a node that takes longer than its peers. `node` is "" for a single rank.

    `seconds`, `peer_s`: mean of a step, of the slowest rank and of its peers. `ratio`: of the culprit's median rank.
    `score`: deviations beyond the median. `parts`: parts that are longer, the largest excess first, with their excess
    in seconds. `cost_s`, `cost_share`: what the job loses in a step, in seconds and as a share (`job_cost`).
    """

    kind: Kind
    ranks: tuple[int, ...]
    node: str
    seconds: float
    peer_s: float
    ratio: float
    score: float
    parts: tuple[tuple[str, float], ...]
    cost_s: float = 0.0
    cost_share: float = 0.0

    @property
    def name(self) -> str:
        """The culprit: 'node n3' or 'rank 5'."""
        return f"node {self.node}" if self.node else f"rank {self.ranks[0]}"


@dataclass(frozen=True)
class HeatMap:
    """Means of the ordinary steps of a window. `seconds`, `peer_s`, `score` [R, C]: by rank and column.

    Columns are parts: actions by chunk and host activities with their own time, and by axis the wait for communication.
    """

    first_step: int
    last_step: int
    step_s: float
    ranks: Integers
    columns: tuple[str, ...]
    seconds: Floats
    peer_s: Floats
    score: Floats
    outliers: tuple[Outlier, ...]

    @property
    def ratio(self) -> Floats:
        """Seconds over the peers' median, [R, C]; 1 where both are 0."""
        return np.divide(self.seconds, self.peer_s, out=np.ones_like(self.seconds), where=self.peer_s > 0)

    def to_json(self) -> dict[str, Any]:
        """Return lists and numbers; a row a rank. None for a rank without ordinary steps."""
        rows: dict[str, Any] = {"ranks": self.ranks.tolist(), "outliers": [asdict(each) for each in self.outliers]}
        for name in ("seconds", "peer_s", "score"):
            values = getattr(self, name).round(9)
            rows[name] = np.where(np.isnan(values), np.array(None, object), values).tolist()
        return vars(self) | rows


class PeerComparison(NamedTuple):
    """Means of a window beside the peers' median, and the deviation of the mean, each [R, C]."""

    seconds: Floats
    peer_s: Floats
    deviation: Floats

    @property
    def score(self) -> Floats:
        return (self.seconds - self.peer_s) / self.deviation


class Loss(NamedTuple):
    """Seconds that a step of a window lost, beside the `usual` steps."""

    usual: StepCube
    seconds: float


def heat_map(
    cube: StepCube, *, roles: Integers | None = None, continuity: int = PERSISTENT_BLOCKS, loss: Loss | None = None
) -> HeatMap:
    """Compare all ranks over the ordinary steps of a window. `roles` [R]: equal codes for peers, by default the stage.
    `continuity`: blocks in which an outlier shows. A rank whose excess grew by MIN_EXPLAINED of a `loss` is an outlier
    as well, also if only some of its steps are long.
    """
    roles = cube.places.codes("pp") if roles is None else roles
    names, values = zip(*_columns(cube), strict=True)
    shown = compare(cube, np.stack(values, 2), roles)
    enough = len(cube.steps) >= MIN_STEPS
    outliers = _find_outliers(cube, roles, continuity, loss) if enough else []
    outliers = [replace(each, parts=_longer_parts(cube, each, names, shown)) for each in outliers]
    first, last = (int(cube.steps[0]), int(cube.steps[-1])) if len(cube.steps) else (0, 0)
    found = tuple(_with_costs(cube, outliers))
    return HeatMap(first, last, cube.step_s, cube.places.rank, names, shown.seconds, shown.peer_s, shown.score, found)


def _columns(cube: StepCube) -> Iterator[tuple[str, Floats]]:
    settled = ("gc", "evaluation", "checkpoint")
    for at, part in enumerate(cube.parts):
        if part.axis in (COMPUTE, HOST_AXIS) and part.name not in settled:
            yield str(part), cube.own[:, :, at]
    yield str(Part(HOST_AXIS, OTHER)), cube.other
    for axis in cube.axes:
        yield f"{axis} wait", cube.wait_of(axis)


def compare(cube: StepCube, values: Floats, roles: Integers) -> PeerComparison:
    """Compare the means of `values` [R, S, C] with the medians of peers.

    Of an even number of peers the lower median counts. The deviation is the largest of: the MAD of the peers' means;
    the standard error of a peer's difference to the others, from means of blocks of steps, which depend less on each
    other than steps do; the noise floor. What makes steps longer for all peers, such as uneven work, is no error.
    """
    seconds = cube.mean(values)
    blocks = np.array_split(np.arange(len(cube.steps)), min(ERROR_BLOCKS, max(1, len(cube.steps))))
    means = np.stack([cube.take(block).mean(values[:, block]) for block in blocks], 1)  # [R, block, C]
    peer_s, mad, spread = np.empty_like(seconds), np.empty_like(seconds), np.zeros_like(seconds)
    for role in np.unique(roles):
        mine = roles == role
        peer_s[mine] = lower_median(seconds[mine])
        mad[mine] = MAD_TO_DEVIATION * lower_median(np.abs(seconds[mine] - peer_s[mine]))
        others = means[mine][::-1] if mine.sum() == 2 else lower_median(means[mine])
        if len(blocks) > 1:
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


def _sums(cube: StepCube) -> Floats:
    """Return the times by KINDS, and the sum but for pauses, [R, S, 5]."""
    own = cube.compute, cube.data, cube.other
    return np.stack([cube.paused, *own, sum(own)], 2)


def _find_outliers(cube: StepCube, roles: Integers, continuity: int, loss: Loss | None) -> list[Outlier]:
    """Return outliers by KINDS, without their parts and costs; a slow node in place of its ranks."""
    sums = _sums(cube)
    whole = compare(cube, sums, roles)
    least = _least_excess(whole, roles, cube.step_s)
    excess = whole.seconds - whole.peer_s
    shows = np.zeros(excess.shape, int)
    for block in np.array_split(np.arange(len(cube.steps)), BLOCKS):
        part = cube.take(block)
        seconds, peer_s, _ = compare(part, sums[:, block], roles)
        shows += seconds - peer_s >= least / 2
    score = np.where(_is_pair(roles), MIN_SCORE_OF_PAIR, MIN_SCORE)
    slow = ((whole.score >= score) & (excess >= least) & (shows >= continuity))[:, : len(KINDS)]
    if loss is not None:
        usual = compare(loss.usual, _sums(loss.usual), roles)
        grown = excess - np.nan_to_num(usual.seconds - usual.peer_s)
        lost = (grown >= np.maximum(MIN_EXPLAINED * loss.seconds, least)) & (shows >= continuity)
        slow[lost[:, 0], 0] = True
        slow[lost[:, -1], 1 + grown[lost[:, -1], 1 : len(KINDS)].argmax(1)] = True
    found = []
    for at, kind in enumerate(KINDS):
        ranks, column = np.flatnonzero(slow[:, at]), PeerComparison(*(array[:, at] for array in whole))
        for node, members in _slow_nodes(
            cube, excess[:, at] / np.maximum(np.maximum(whole.peer_s, least)[:, at], 1e-12)
        ):
            middle = excess[members, at] >= least[members, at]
            if middle.mean() > 0.5 and np.median(shows[members, at]) >= continuity:
                found.append(_outlier(cube, kind, members, cube.places.nodes[node], column))
                ranks = np.setdiff1d(ranks, members)
        found += [_outlier(cube, kind, np.array([rank]), "", column) for rank in ranks]
    return found


def _least_excess(values: PeerComparison, roles: Integers, step_s: float) -> Floats:
    """Return the smallest excess of an outlier over its peers, [R, C]."""
    pair = _is_pair(roles)
    ratio = np.where(pair, MIN_RATIO_OF_PAIR, MIN_RATIO)
    return np.asarray(np.maximum((ratio - 1) * values.peer_s, np.where(pair, MIN_SHARE_OF_PAIR, MIN_SHARE) * step_s))


def _is_pair(roles: Integers) -> Booleans:
    """Return which ranks have a single peer, [R, 1]."""
    _, role, ranks = np.unique(roles, return_inverse=True, return_counts=True)
    return np.asarray(ranks[role.reshape(-1)] == 2)[:, None]


def _slow_nodes(cube: StepCube, relative: Floats) -> Iterator[tuple[int, Integers]]:
    """Yield the nodes of several ranks whose median rank is an outlier among all nodes, and their ranks' positions.
    `relative` [R]: excess over the peers' median.
    """
    order = np.argsort(cube.places.node, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(cube.places.node[order])) + 1)
    several = [ranks for ranks in members if len(ranks) > 1]
    if len(members) < 2 or not several:
        return
    medians = np.array([lower_median(relative[ranks]) for ranks in several])
    middle = lower_median(medians)
    deviation = max(MAD_TO_DEVIATION * float(lower_median(np.abs(medians - middle))), NOISE_FLOOR)
    for ranks, median in zip(several, medians, strict=True):
        if (median - middle) / deviation >= MIN_SCORE and median - middle >= MIN_RATIO - 1:
            yield int(cube.places.node[ranks[0]]), ranks


def _outlier(cube: StepCube, kind: Kind, members: Integers, node: str, values: PeerComparison) -> Outlier:
    known = members[~np.isnan(values.seconds[members])]
    slowest = known[np.argmax(values.seconds[known] - values.peer_s[known])]
    ratio = np.median(values.seconds[known] / np.maximum(values.peer_s[known], 1e-9))
    return Outlier(
        kind, tuple(map(int, cube.places.rank[members])), node, float(values.seconds[slowest]),
        float(values.peer_s[slowest]), float(ratio), float(np.median(values.score[known])), (),
    )  # fmt: skip


def _longer_parts(
    cube: StepCube, outlier: Outlier, names: tuple[str, ...], shown: PeerComparison
) -> tuple[tuple[str, float], ...]:
    """Return the parts of the outlier's kind that are longer than the peers', on the mean of its ranks."""
    if outlier.kind == "pause":
        return ()
    kinds = {str(part): "compute" if part.axis == COMPUTE else "data"
             for part in cube.parts if part.name not in ("gc", PAUSE)}  # fmt: skip
    ranks = cube.places.index(np.array(outlier.ranks))
    excess = (shown.seconds - shown.peer_s)[ranks].mean(0)
    longer = [(name, float(more)) for name, more in zip(names, excess, strict=True)
              if kinds.get(name, "host") == outlier.kind and more > 0 and not name.endswith(" wait")]  # fmt: skip
    return tuple(sorted(longer, key=lambda part: -part[1])[:3])


def excess_of(cube: StepCube, outlier: Outlier) -> Excess:
    """Return by how much an outlier's ranks exceed their peers in each step: without its fault a rank is like them."""
    ranks, stage = cube.places.index(np.array(outlier.ranks)), cube.places.codes("pp")
    times: dict[Model, Floats] = {"compute": cube.other} if outlier.kind == "host" else times_of(cube)
    of_kind: dict[Kind, tuple[Model, ...]] = {"pause": ("gc",), "data": ("data",)}
    more: dict[Model, Floats] = {}
    for part in times.keys() & of_kind.get(outlier.kind, ("compute", "optimizer")):
        peers = {role: lower_median(times[part][stage == role]) for role in np.unique(stage[ranks])}
        more[part] = times[part][ranks] - np.stack([peers[stage[rank]] for rank in ranks])
    return Excess(ranks, more)


def _with_costs(cube: StepCube, outliers: list[Outlier]) -> Iterator[Outlier]:
    """Yield the outliers with their costs, the costliest first."""
    costs = job_costs(cube, {str(number): excess_of(cube, outlier) for number, outlier in enumerate(outliers)})
    means = [float(cost[cube.ordinary_steps].mean()) for cost in costs.values()]
    for cost, outlier in sorted(zip(means, outliers, strict=True), key=lambda pair: -pair[0]):
        yield replace(outlier, cost_s=cost, cost_share=cost / max(cube.step_s, 1e-12))
