"""The loss of a job's steps: its step time, cut where its mean shifts, each stretch beside the job's steps before.

The loss of a stretch is its mean step less that of the lowest stretch before it: a cause is measured against the steps
before its onset, however it is found. Steps with more tokens or FLOPs take longer: times are those of a step of mean
work (ResiHP, arXiv 2605.06374). Packed sequences make healthy steps vary: T = a N + b sum(l^2) for N tokens in
sequences of l. The model FLOPs of a step are such a sum themselves, so tokens and FLOPs, which every step records,
predict as well as tokens and squared lengths.

`change_points` cuts a series (binary segmentation). Its noise is the MAD of differences, which a shift does not
touch, or the deviation within the segments, where that is larger; single outliers count as far as noise goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megascale.operate.diagnose.slow.peers import MAD_TO_DEVIATION
from megascale.operate.diagnose.slow.step_cube import Booleans, Floats, Integers, StepCube

MIN_SHIFT = 6.0  # smallest shift of a mean in standard errors: the largest of all cuts of a noisy series reaches 4
MIN_RARE_SHIFT = 3.0  # smallest shift, in standard errors, where one mean is less than half of the other
MIN_SEGMENT = 8  # fewest points of a segment
MAX_NOISE = 5.0  # deviations from the median of its neighbours to which an outlier is clipped
WINDOW = 50  # most steps of a stretch
BLOCK = 10  # steps whose mean varies by the noise of a run: what other programs take away lasts longer than a step
MAX_EXCESS = 0.25  # largest share by which an ordinary step exceeds its prediction
ROUNDS = 3  # fits, each without the steps that the last one calls slow
MIN_REST_SHARE = 0.02  # smallest share of a step that is lost for no known cause, to be told, or to look for its cause

MIN_EXPLAINED = 1 / 3
"""Share of a loss from which on the causes that are known explain all of it: the model is not more exact, and a process
that is stopped now and then loses as much in waits, which are as long on its peers.
"""


class Stretch(NamedTuple):
    """Steps `first` to `last` of `seconds` each, in the mean. `usual_s`: of the steps `usual`, the first and the last
    of the quickest level before it, or after it if none before is quicker; None if none is.
    """

    first: int
    last: int
    seconds: float
    usual_s: float | None = None
    usual: tuple[int, int] = (0, -1)

    @property
    def lost_s(self) -> float:
        """Seconds that a step lost, 0 if nothing tells."""
        return 0.0 if self.usual_s is None else max(0.0, self.seconds - self.usual_s)


@dataclass(frozen=True)
class StepLevels:
    """The like `steps` of a run [N] by number, their `seconds` [N] for mean work, their `work` [N] relative to it, the
    levels in them by position, and the stretches of these, of WINDOW steps at most, in order.
    """

    steps: Integers
    seconds: Floats
    work: Floats
    levels: tuple[slice, ...]
    stretches: tuple[Stretch, ...]

    def noise_s(self, steps: Integers, explained: Floats) -> float:
        """Return the deviation of the mean of BLOCK like steps of a level: by single steps, or by the medians of
        blocks, where that is larger. `explained`: seconds of `steps` that a cause explains by the model, and are no
        noise, scaled to what the steps of a level differ by: the model is only as exact as MIN_EXPLAINED.
        """
        costs, mine = np.zeros(len(self.steps)), np.isin(self.steps, steps)
        costs[mine] = explained[np.searchsorted(steps, self.steps[mine])] / self.work[mine]
        differ = np.concatenate([costs[level] - costs[level].mean() for level in self.levels])
        scale = float(self.seconds @ differ) / max(float(differ @ differ), 1e-12)
        seconds = self.seconds - min(max(0.0, scale), 1 / MIN_EXPLAINED) * costs
        apart = np.concatenate([seconds[level] - np.median(seconds[level]) for level in self.levels])
        of_steps = MAD_TO_DEVIATION * float(np.median(np.abs(apart))) / np.sqrt(BLOCK)
        blocks = (np.array_split(seconds[level], max(1, (level.stop - level.start) // BLOCK)) for level in self.levels)
        changes = np.concatenate([np.diff([np.median(block) for block in of_level]) for of_level in blocks])
        of_blocks = MAD_TO_DEVIATION * float(np.median(np.abs(changes))) / np.sqrt(2) if len(changes) else 0.0
        return float(max(of_steps, of_blocks))


def step_levels(recent: StepCube, sample: StepCube, onsets: Iterable[int] = ()) -> StepLevels:
    """Return the levels of a run by its newest steps, and by a sample of the steps before them. `onsets`: first steps
    of levels that are known: a cause is often clearer than the steps that it makes longer.
    """
    older, newer = _step_times(sample), _step_times(recent)
    before = older[:, older[0] < recent.steps.min(initial=np.iinfo(np.int32).max)]
    number, wall, tokens, flops = np.concatenate([before, newer], 1)
    steps, work = number.astype(int), relative_work(tokens, flops, wall)
    seconds = wall / work
    longer = np.maximum(0.0, seconds - np.median(seconds)) if len(seconds) else seconds
    bounds = [0]  # cuts that leave segments of MIN_SEGMENT points or more
    for cut in sorted({*change_points(seconds), *shifts_of(longer), *np.searchsorted(steps, sorted(onsets)).tolist()}):
        if min(cut - bounds[-1], len(steps) - cut) >= MIN_SEGMENT:
            bounds.append(cut)
    bounds += [len(steps)] if len(steps) else []
    levels = tuple(slice(*ends) for ends in itertools.pairwise(bounds))
    return StepLevels(steps, seconds, work, levels, tuple(_stretches(steps, seconds, levels)))


def relative_work(tokens: Floats, flops: Floats, wall: Floats) -> Floats:
    """Return the work of steps [S] relative to their mean, by the time that it should take."""
    predicted = predict_seconds(tokens, flops, wall, np.ones(len(wall), bool))
    return predicted / max(float(predicted.mean()), 1e-12) if len(predicted) else predicted


def _step_times(cube: StepCube) -> Floats:
    """Return number, mean time over ranks, tokens and FLOPs of the like steps of which all ranks are known, [4, S]."""
    ranks = (cube.wall > 0).sum(0)
    like = cube.ordinary_steps & (ranks == ranks.max(initial=1))
    times = np.stack([cube.steps, cube.wall.sum(0, dtype=np.float64) / np.maximum(ranks, 1), cube.tokens, cube.flops])
    return times[:, like]


def shifts_of(series: Floats) -> list[int]:
    """Return the positions at which a series of what a cause costs shifts: its change points, and its largest shifts up
    and down (CUSUM), if one side has less than half of the other. It may be 0 on one side, and rare on the other.
    """
    sums = np.cumsum(series - series.mean())[:-1] if len(series) > 1 else series[:0]
    largest = (int(np.argmin(sums)) + 1, int(np.argmax(sums)) + 1) if len(sums) else ()
    return [*change_points(series), *(at for at in largest if _differ(series[:at], series[at:]))]


def _differ(before: Floats, after: Floats) -> bool:
    """Return True if one of two means is less than half of the other, and their difference is no chance."""
    less, more = sorted((float(before.mean()), float(after.mean())))
    error = np.sqrt(before.var() / len(before) + after.var() / len(after))
    return less < more / 2 and more - less >= MIN_RARE_SHIFT * error


def _stretches(number: Integers, seconds: Floats, levels: Sequence[slice]) -> Iterator[Stretch]:
    """Yield the levels in equal windows."""
    means = [float(seconds[level].mean()) for level in levels]
    for at, level in enumerate(levels):
        quickest = (min(range(*ends), key=means.__getitem__, default=at) for ends in ((at,), (at + 1, len(levels))))
        usual = next((other for other in quickest if means[other] < means[at]), None)
        size = level.stop - level.start
        for window in np.array_split(np.arange(level.start, level.stop), -(-size // WINDOW)):
            one = Stretch(int(number[window[0]]), int(number[window[-1]]), float(seconds[window].mean()))
            if usual is not None:
                ends = number[levels[usual]][[0, -1]]
                one = one._replace(usual_s=means[usual], usual=(int(ends[0]), int(ends[1])))
            yield one


def change_points(values: Floats, threshold: float = MIN_SHIFT) -> list[int]:
    """Return the positions at which a new segment of a series begins, in ascending order."""
    if len(values) < 2 * MIN_SEGMENT:
        return []
    noise = MAD_TO_DEVIATION * float(np.median(np.abs(np.diff(values)))) / np.sqrt(2)
    noise = max(noise, 1e-4 * float(np.abs(values).mean()), 1e-12)
    padded = np.pad(values, MIN_SEGMENT, mode="symmetric")
    median = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * MIN_SEGMENT + 1), 1)
    values = np.clip(values, median - MAX_NOISE * noise, median + MAX_NOISE * noise)  # without outliers
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


def _shifts(values: Floats, noise: float) -> Floats:
    """Return by how many standard errors the means before and after each cut differ; the first after MIN_SEGMENT."""
    size = len(values)
    at = np.arange(MIN_SEGMENT, size - MIN_SEGMENT + 1)
    values = values - values.mean()
    sums, squares = np.cumsum(values), np.cumsum(values**2)
    left, right = sums[at - 1] / at, (sums[-1] - sums[at - 1]) / (size - at)
    within = np.sqrt(np.maximum(0.0, squares[-1] - at * left**2 - (size - at) * right**2) / (size - 2))
    return np.asarray(np.abs(left - right) * np.sqrt(at * (size - at) / size) / np.maximum(noise, within))


def predict_seconds(tokens: Floats, squares: Floats, seconds: Floats, ordinary: Booleans) -> Floats:
    """Return the predicted seconds of steps [S], fitted on the ordinary ones.

    `squares`: the sum of squared lengths, or the FLOPs. The fit starts at the steps' median time per token.
    """
    work = np.stack([tokens, squares], 1).astype(np.float64)
    work /= np.maximum(work.max(0, initial=0.0), 1e-300)
    usable = ordinary & (seconds > 0) & (work[:, 0] > 0)
    if not usable.any():
        return np.array(seconds, np.float64)
    predicted = work[:, 0] * np.median(seconds[usable] / work[usable, 0])
    for _ in range(ROUNDS):
        fitted = usable & (seconds <= (1 + MAX_EXCESS) * predicted)
        if fitted.sum() < 2:
            break
        factors = np.linalg.lstsq(work[fitted], seconds[fitted], rcond=1e-3)[0]  # equal columns share the time
        if (factors < 0).any():
            factors = np.array([np.median(seconds[fitted] / work[fitted, 0]), 0.0])
        predicted = work @ factors
    return predicted


def excess_seconds(tokens: Floats, squares: Floats, seconds: Floats, ordinary: Booleans) -> Floats:
    """Return by how much ordinary steps exceed their prediction; 0 for those below MAX_EXCESS of it."""
    predicted = predict_seconds(tokens, squares, seconds, ordinary)
    return np.where(ordinary & (seconds > (1 + MAX_EXCESS) * predicted), seconds - predicted, 0.0)
