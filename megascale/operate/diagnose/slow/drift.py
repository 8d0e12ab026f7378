"""Changes since the start of a run: the parts of a step that grew, since which step, and what it cost of the MFU.

A part has grown if it is larger in most blocks of the newest steps, too: a disturbance that is over is no drift.
`drift` compares the last segment of every part with the first. Where ranks share cores none is named.
`entry_spread` measures how far apart ranks enter the last reduction of gradients: the paper's MFU decay (6.3) shows
there, with no part of the compute any longer, and ranks that are late in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from megascale.core.rank import format_ranks
from megascale.operate.diagnose.slow.mfu_breakdown import ACTIONS
from megascale.operate.diagnose.slow.peers import BLOCKS, PERSISTENT_BLOCKS, Groups, lower_median
from megascale.operate.diagnose.slow.step_cube import OTHER, Floats, StepCube
from megascale.operate.diagnose.slow.step_levels import change_points, relative_work
from megascale.record.events import COMPUTE

POINTS = 400  # most points of a series: longer runs are averaged over blocks of steps
MIN_GROWTH = 0.02  # smallest growth of a part, as a share of the step
NEWEST = 50  # newest steps in which a growth shows, but at most half of the run
CORRELATED = 0.5  # smallest correlation of the entries' spread with pauses that names them


@dataclass(frozen=True)
class Growth:
    """A part of a step that grew from `before_s` to `after_s`, means of the first and the last segment, and has
    been larger than the former by MIN_GROWTH of the step since step `since`. `everywhere`: on most ranks; else `ranks`
    are those on which it grew by more than half of the largest growth, none if they share cores. `mfu_points`: the MFU
    that this costs now, as a share of 1; None if the peak is unknown.
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

    `same_rank`: share of the steps in which the most frequent last rank of a group is last, `last_ranks`: these ranks,
    none if they share cores; `by_chance`: the share if all ranks are last as often. `gc_correlation`: with the pauses
    for garbage collection, None without any.
    """

    before_s: float
    after_s: float
    since: int
    same_rank: float
    last_ranks: tuple[int, ...]
    by_chance: float
    gc_correlation: float | None

    @property
    def cause(self) -> str:
        """The cause in plain words."""
        if (self.gc_correlation or 0.0) >= CORRELATED:
            return "pauses for garbage collection, on ranks in turn"
        if self.same_rank >= (1 + self.by_chance) / 2:
            last = format_ranks(self.last_ranks) if self.last_ranks else "the same ranks"
            return (
                f"{last} {'is' if len(self.last_ranks) == 1 else 'are'} last in most steps: slow, or waiting for others"
            )
        return "ranks are late in turn: irregular work of their hosts"

    def to_text(self) -> str:
        """Return the change and its cause in a line."""
        spread = f"from {self.before_s * 1e3:.3g} to {self.after_s * 1e3:.3g} ms since step {self.since}"
        return f"entries into the last gradient reduction spread {spread}: {self.cause}"


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
        lines = []
        for growth in self.growths:
            cost = "" if growth.mfu_points is None else f", {100 * growth.mfu_points:.1f} points of MFU"
            some = f", on {format_ranks(growth.ranks)}" if growth.ranks else ""
            where = ", on most ranks" if growth.everywhere else some
            times = f"from {growth.before_s * 1e3:.4g} to {growth.after_s * 1e3:.4g} ms a step"
            lines.append(f"{growth.part} grew {times} since step {growth.since}{where}{cost}")
        if self.spread:
            lines.append(self.spread.to_text())
        if lines and self.mfu_before and self.mfu_after:
            lines.insert(0, f"MFU went from {self.mfu_before:.1%} to {self.mfu_after:.1%}")
        return "\n".join(lines) or "no part of a step has grown"


def drift(cube: StepCube, peak_flops: float = 0.0) -> Drift:
    """Return what changed over a cube's warm steps. `peak_flops`: of all ranks together, 0 if unknown. Steps that lack
    rows of ranks, whose times are 0, would look faster.
    """
    ranks = (cube.wall > 0).sum(0)
    cube = cube.take(cube.warm & (ranks == ranks.max(initial=0)))
    if not len(cube.steps):
        return Drift((), None, 0.0, 0.0, None, None)
    wall = cube.wall.mean(0, dtype=np.float64)
    work = relative_work(cube.tokens, cube.flops, wall)
    walls = np.array([block.mean() for block in _blocks(wall / work)])
    cuts_of_steps, means = _segments(walls)
    step_before, step_after = means[0], means[-1]
    growths, cuts = [], []
    for name, values in _series(cube):
        if (found := _growth(values.mean(0, dtype=np.float64) / work, MIN_GROWTH * step_before)) is None:
            continue
        before, after, since, (first, cut) = found
        of_work = values / work
        by_rank = of_work[:, cut:].mean(1) - of_work[:, :first].mean(1)
        everywhere = bool(lower_median(by_rank) >= (after - before) / 2)
        most = cube.places.rank[by_rank > by_rank.max() / 2]
        ranks = () if everywhere or cube.places.crowded else tuple(map(int, most))
        cuts.append((after - before, since))
        growths.append(Growth(name, int(cube.steps[cut]), before, after, everywhere, None, ranks))
    if not cuts_of_steps and cuts:  # the steps vary too much to tell: before and after the largest growth
        _, at = max(cuts)
        step_before, step_after = float(walls[:at].mean()), float(walls[at:].mean())
    steps, flops = (step_before, step_after), float(cube.flops.mean())
    mfu_before, mfu_after = (flops / (one * peak_flops) if peak_flops and one else None for one in steps)
    if mfu_after is not None:
        for at, growth in enumerate(growths):
            more = growth.after_s - growth.before_s
            growths[at] = replace(growth, mfu_points=mfu_after * more / max(step_after - more, 1e-12))
    growths.sort(key=lambda growth: growth.before_s - growth.after_s)
    return Drift(tuple(growths), entry_spread(cube, step_before), *steps, mfu_before, mfu_after)


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


def _blocks(values: Floats) -> list[Floats]:
    """Split a series into blocks of steps, POINTS at most."""
    return np.array_split(values, min(POINTS, len(values)))


def _segments(values: Floats) -> tuple[list[int], list[float]]:
    """Return where the segments of a series begin, without the first, and the means of all."""
    cuts = change_points(values)
    return cuts, [float(segment.mean()) for segment in np.split(values, cuts)]


def _growth(values: Floats, least: float) -> tuple[float, float, int, tuple[int, int]] | None:
    """Return the means of the first and the last segment of a series, the first block of a growth by `least`, and the
    positions of the first segment's end and of this block; None without a growth by `least`, and by half of the growth
    in most blocks of the newest steps.
    """
    blocks = _blocks(values)
    cuts, means = _segments(np.array([block.mean() for block in blocks]))
    before, after = means[0], means[-1]
    if not cuts or after - before < least:
        return None
    since = max(cut for cut, mean in zip(cuts, means, strict=False) if mean - before <= least)  # it may fall at first
    newest = np.array_split(values[-min(NEWEST, len(values) // 2) :], BLOCKS)
    if sum(float(block.mean()) >= (before + after) / 2 for block in newest) < PERSISTENT_BLOCKS:
        return None
    return before, after, since, (sum(map(len, blocks[: cuts[0]])), sum(map(len, blocks[:since])))


def entry_spread(cube: StepCube, step_s: float) -> EntrySpread | None:
    """Return how the entries into the last reduction of gradients spread, if they spread more than at the start by
    MIN_GROWTH of the step.
    """
    known = (cube.entered_ns > 0).all(0)
    entered, groups = cube.entered_ns[:, known], Groups.of(cube.places.group_codes("dp"))
    sizes = groups.sizes
    if not known.any() or sizes.max(initial=0) < 2:
        return None
    last = groups.reduce(np.maximum, entered)
    spread = (last - groups.reduce(np.minimum, entered)).mean(0) / 1e9
    if (found := _growth(spread, MIN_GROWTH * step_s)) is None:
        return None
    before, after, _, (_, cut) = found
    is_last = entered[groups.order, cut:] == np.repeat(last, sizes, 0)[:, cut:]
    often = is_last.mean(1)
    most = np.maximum.reduceat(often, groups.starts)
    mine = groups.order[often == np.repeat(most, sizes)]
    last_ranks = () if cube.places.crowded else tuple(sorted(map(int, cube.places.rank[mine])))
    # the changes of the series are compared: two series that grow are correlated anyway
    changes = np.diff(spread), np.diff(_pause_spread(cube)[known])
    correlated = len(spread) > 2 and min(map(np.std, changes)) > 0
    return EntrySpread(
        before, after, int(cube.steps[known][cut]), float(most.mean()), last_ranks, 1 / float(sizes.mean()),
        float(np.corrcoef(*changes)[0, 1]) if correlated else None,
    )  # fmt: skip


def _pause_spread(cube: StepCube) -> Floats:
    """Return by how much the pauses of replicas differ, [S]: the longest of each stage, added up."""
    coords = [cube.places.coords[axis] for axis in ("cp", "dp", "pp")]
    stages = np.zeros((*(int(one.max()) + 1 for one in coords), len(cube.steps)))
    np.maximum.at(stages, tuple(coords), cube.gc)
    pauses = stages.sum(2)
    return np.asarray(pauses.max((0, 1)) - pauses.min((0, 1)))
