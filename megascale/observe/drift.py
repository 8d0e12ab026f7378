"""Changes since the start of a run: the parts of a step that grew, since which step, and what it cost of the MFU.

A part has grown if it is larger in most blocks of the newest steps, too: a disturbance that is over is no drift.
`change_points` cuts a series where its mean shifts (binary segmentation). The noise is the MAD of differences, which a
shift does not touch, or the deviation within the segments, where that is larger; single outliers count as far as noise
goes. `drift` compares the last segment of every part with the first. `entry_spread` measures how far
apart ranks enter the last reduction of gradients: the paper's MFU decay (6.3) shows there, with no part of the compute
any longer, and ranks that are late in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from megascale.core.events import COMPUTE
from megascale.core.rank import format_ranks
from megascale.observe.heatmap import BLOCKS, MAD_TO_DEVIATION, PERSISTENT_BLOCKS, lower_median
from megascale.observe.mfu_ledger import ACTIONS
from megascale.observe.step_cube import OTHER, Floats, StepCube
from megascale.observe.step_work import predict_seconds

MIN_SHIFT = 6.0
"""Smallest shift of a mean in standard errors: the largest of all cuts of a noisy series reaches 4."""

MIN_SEGMENT = 8
"""Fewest points of a segment."""

MAX_NOISE = 5.0
"""Deviations from the median of its neighbours to which an outlier is clipped."""

POINTS = 400
"""Most points of a series: longer runs are averaged over blocks of steps."""

MIN_GROWTH = 0.02
"""Smallest growth of a part, as a share of the step."""

NEWEST = 50
"""Newest steps in which a growth shows, but at most half of the run."""

CORRELATED = 0.5
"""Smallest correlation of the entries' spread with pauses that names them."""


@dataclass(frozen=True)
class Growth:
    """A part of a step that grew from `before_s` to `after_s`, means of the first and the last segment. `everywhere`:
    on most ranks; else `ranks` are those on which it grew by more than half of the largest growth. `mfu_points`: the
    MFU that this costs now, as a share of 1; None if the peak is unknown.
    """

    part: str
    since: int
    before_s: float
    after_s: float
    everywhere: bool
    mfu_points: float | None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class EntrySpread:
    """How far apart the ranks of a data-parallel group enter the last reduction of gradients, mean over groups.

    `same_rank`: share of the steps in which the most frequent last rank of a group is last, `by_chance`: if all ranks
    are last as often. `gc_correlation`: with the pauses for garbage collection, None without any.
    """

    before_s: float
    after_s: float
    since: int
    same_rank: float
    by_chance: float
    gc_correlation: float | None

    @property
    def cause(self) -> str:
        """The cause in plain words."""
        if (self.gc_correlation or 0.0) >= CORRELATED:
            return "pauses for garbage collection, on ranks in turn"
        if self.same_rank >= (1 + self.by_chance) / 2:
            return "the same rank is last in most steps: it is slow"
        return "ranks are late in turn: irregular work of their hosts"


@dataclass(frozen=True)
class Drift:
    """`growths`: the largest first. `spread`: None if the entries do not spread. MFU and step time of the first and the
    last segment of the step time.
    """

    growths: tuple[Growth, ...]
    spread: EntrySpread | None
    step_before_s: float
    step_after_s: float
    mfu_before: float | None
    mfu_after: float | None

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and the cause of a spread."""
        spread = asdict(self.spread) | {"cause": self.spread.cause} if self.spread else None
        return asdict(self) | {"spread": spread}

    def to_text(self) -> str:
        """Return a line for each change."""
        lines = [_growth_line(growth) for growth in self.growths]
        if self.spread:
            lines.append(
                f"entries into the last gradient reduction spread from {self.spread.before_s * 1e3:.3g} to "
                f"{self.spread.after_s * 1e3:.3g} ms since step {self.spread.since}: {self.spread.cause}"
            )
        if lines and self.mfu_before and self.mfu_after:
            lines.insert(0, f"MFU went from {self.mfu_before:.1%} to {self.mfu_after:.1%}")
        return "\n".join(lines) or "no part of a step has grown"


def _growth_line(growth: Growth) -> str:
    cost = "" if growth.mfu_points is None else f", {100 * growth.mfu_points:.1f} points of MFU"
    where = f"on {format_ranks(growth.ranks)}" if growth.ranks else "on most ranks"
    return (
        f"{growth.part} grew from {growth.before_s * 1e3:.4g} to {growth.after_s * 1e3:.4g} ms a step since step "
        f"{growth.since}, {where}{cost}"
    )


def change_points(values: Floats, threshold: float = MIN_SHIFT) -> list[int]:
    """Return the positions at which a new segment of a series begins, in ascending order."""
    noise = MAD_TO_DEVIATION * float(np.median(np.abs(np.diff(values)))) / np.sqrt(2) if len(values) > 1 else 0.0
    noise = max(noise, 1e-4 * float(np.abs(values).mean()) if len(values) else 0.0, 1e-12)
    values = _without_outliers(values, noise)
    cuts: list[int] = []
    open_segments = [(0, len(values))]
    while open_segments:
        start, stop = open_segments.pop()
        if stop - start < 2 * MIN_SEGMENT:
            continue
        score = _shifts(values[start:stop], noise)
        if score.max() >= threshold:
            cut = start + MIN_SEGMENT + int(np.argmax(score))
            cuts.append(cut)
            open_segments += [(start, cut), (cut, stop)]
    return sorted(cuts)


def _without_outliers(values: Floats, noise: float) -> Floats:
    """Return a series whose outliers are clipped to MAX_NOISE deviations from the median of their neighbours."""
    if not len(values):
        return values
    padded = np.pad(values, MIN_SEGMENT, mode="symmetric")
    median = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * MIN_SEGMENT + 1), 1)
    return np.asarray(np.clip(values, median - MAX_NOISE * noise, median + MAX_NOISE * noise))


def _shifts(values: Floats, noise: float) -> Floats:
    """Return by how many standard errors the means before and after each cut differ; the first after MIN_SEGMENT."""
    size = len(values)
    at = np.arange(MIN_SEGMENT, size - MIN_SEGMENT + 1)
    values = values - values.mean()
    sums, squares = np.cumsum(values), np.cumsum(values**2)
    left, right = sums[at - 1] / at, (sums[-1] - sums[at - 1]) / (size - at)
    within = np.sqrt(np.maximum(0.0, squares[-1] - at * left**2 - (size - at) * right**2) / (size - 2))
    return np.asarray(np.abs(left - right) * np.sqrt(at * (size - at) / size) / np.maximum(noise, within))


def drift(cube: StepCube, peak_flops: float = 0.0) -> Drift:
    """Return what changed over a cube's warm steps. `peak_flops`: of all ranks together, 0 if unknown. Steps that lack
    rows of ranks, whose times are 0, would look faster.
    """
    ranks = (cube.wall > 0).sum(0)
    cube = cube.take(cube.warm & (ranks == ranks.max(initial=0)))
    if not len(cube.steps):
        return Drift((), None, 0.0, 0.0, None, None)
    wall = cube.wall.mean(0, dtype=np.float64)
    always = np.ones(len(wall), bool)
    predicted = predict_seconds(cube.tokens, cube.flops, wall, always)
    work = predicted / max(float(predicted.mean()), 1e-12)
    blocks = np.array_split(np.arange(len(wall)), min(POINTS, len(wall)))
    walls = _blocks(wall / work, blocks)
    step_before, step_after, cut_of_steps = _ends(walls)
    growths, cuts = [], []
    for name, values in _series(cube):
        series = values.mean(0, dtype=np.float64) / work
        before, after, since = _ends(_blocks(series, blocks))
        if since is None or after - before < MIN_GROWTH * step_before or not _persists(series, before, after):
            continue
        cut, of_work = blocks[since][0], values / work
        by_rank = of_work[:, cut:].mean(1) - of_work[:, :cut].mean(1)
        everywhere = lower_median(by_rank) >= (after - before) / 2
        ranks = () if everywhere else tuple(map(int, cube.places.rank[by_rank > by_rank.max() / 2]))
        cuts.append((after - before, since))
        growths.append(Growth(name, int(cube.steps[cut]), before, after, bool(everywhere), None, ranks))
    if cut_of_steps is None and cuts:  # the steps vary too much to tell: before and after the largest growth
        _, at = max(cuts)
        step_before, step_after = float(walls[:at].mean()), float(walls[at:].mean())
    mfus = [_mfu(cube, seconds, peak_flops) for seconds in (step_before, step_after)]
    growths = [replace(each, mfu_points=_mfu_points(each, step_after, mfus[1])) for each in growths]
    growths.sort(key=lambda growth: growth.before_s - growth.after_s)
    return Drift(tuple(growths), entry_spread(cube, step_before), step_before, step_after, mfus[0], mfus[1])


def _mfu(cube: StepCube, seconds: float, peak_flops: float) -> float | None:
    return float(cube.flops.mean()) / (seconds * peak_flops) if peak_flops and seconds else None


def _mfu_points(growth: Growth, step_s: float, mfu: float | None) -> float | None:
    more = growth.after_s - growth.before_s
    return None if mfu is None else mfu * more / max(step_s - more, 1e-12)


def _series(cube: StepCube) -> Iterator[tuple[str, Floats]]:
    """Yield the parts that are followed, with their times [R, S]."""
    for group in dict.fromkeys(ACTIONS.values()):
        names = [name for name, of in ACTIONS.items() if of == group]
        yield group, cube.own_of(COMPUTE, *names)
    for axis in cube.axes:
        yield f"wait for {axis}", cube.wait_of(axis)
    yield "data", cube.data
    yield "gc", cube.gc
    yield OTHER, cube.other


def _blocks(values: Floats, blocks: list) -> Floats:
    return np.array([values[block].mean() for block in blocks])


def _ends(values: Floats) -> tuple[float, float, int | None]:
    """Return the means of the first and the last segment, and where the second begins; None without a change."""
    cuts = change_points(values)
    if not cuts:
        return float(values.mean()), float(values.mean()), None
    return float(values[: cuts[0]].mean()), float(values[cuts[-1] :].mean()), cuts[0]


def _persists(values: Floats, before: float, after: float) -> bool:
    """Return True if a series has grown by half of its growth or more in most blocks of the newest steps."""
    newest = np.array_split(values[-min(NEWEST, len(values) // 2) :], BLOCKS)
    return sum(float(block.mean()) >= (before + after) / 2 for block in newest) >= PERSISTENT_BLOCKS


def entry_spread(cube: StepCube, step_s: float) -> EntrySpread | None:
    """Return how the entries into the last reduction of gradients spread, if they spread more than at the start by
    MIN_GROWTH of the step.
    """
    known = (cube.entered_ns > 0).all(0)
    entered, code = cube.entered_ns[:, known], cube.places.group_codes("dp")
    order = np.argsort(code, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(code[order]) != 0))
    sizes = np.diff(np.append(starts, len(order)))
    if not known.any() or sizes.max() < 2:
        return None
    late = entered[order]
    first, last = np.minimum.reduceat(late, starts), np.maximum.reduceat(late, starts)
    spread = (last - first).mean(0) / 1e9
    blocks = np.array_split(np.arange(len(spread)), min(POINTS, len(spread)))
    before, after, since = _ends(_blocks(spread, blocks))
    if since is None or after - before < MIN_GROWTH * step_s or not _persists(spread, before, after):
        return None
    is_last = late[:, blocks[since][0] :] == np.repeat(last, sizes, 0)[:, blocks[since][0] :]
    same_rank = float(np.maximum.reduceat(is_last.mean(1), starts).mean())
    correlation = _correlation(spread, _pause_spread(cube)[known])
    since_step = int(cube.steps[known][blocks[since][0]])
    return EntrySpread(before, after, since_step, same_rank, 1 / float(sizes.mean()), correlation)


def _pause_spread(cube: StepCube) -> Floats:
    """Return by how much the pauses of replicas differ, [S]: the longest of each stage, added up."""
    coords, shape = cube.places.coords, [int(cube.places.coords[axis].max()) + 1 for axis in ("cp", "dp", "pp")]
    stages = np.zeros((*shape, len(cube.steps)))
    np.maximum.at(stages, tuple(coords[axis] for axis in ("cp", "dp", "pp")), cube.gc)
    pauses = stages.sum(2)
    return np.asarray(pauses.max((0, 1)) - pauses.min((0, 1)))


def _correlation(spread: Floats, pauses: Floats) -> float | None:
    """Return the correlation of the changes of two series: two series that grow are correlated anyway."""
    changes = np.diff(spread), np.diff(pauses)
    return float(np.corrcoef(*changes)[0, 1]) if len(spread) > 2 and min(map(np.std, changes)) > 0 else None
