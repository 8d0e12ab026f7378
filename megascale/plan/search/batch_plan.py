"""A plan of the global batch: the critical batch along a training, measured or by a law, and a ramp-up after it."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale.config.batch_rampup import BatchSizes
from megascale.core.errors import DataError
from megascale.plan.search.batch_laws import CRITICAL_EXPONENT, Training, kaplan_critical

MOST_LEVELS = 16
"""Most increments of a ramp-up."""

GRID = 50
"""Points of a training at which a ramp-up is compared with the critical batch."""

Critical = Callable[[float], float]
"""The critical batch, in tokens, as a function of the tokens of a training that came before."""


@dataclass(frozen=True)
class NoiseCurve:
    """Noise scales of a run, in tokens, after `tokens` of its training, ascending."""

    tokens: Sequence[float]
    scales: Sequence[float]

    def critical(self, tokens: float) -> float:
        """The noise scale after `tokens`: interpolated, and beyond the run's end by the law of tokens. Before the first
        measurement it is the first.
        """
        if tokens >= self.tokens[-1]:
            return self.scales[-1] * (tokens / self.tokens[-1]) ** CRITICAL_EXPONENT
        after = bisect.bisect_right(self.tokens, tokens)
        if after == 0:
            return self.scales[0]
        (a, b), (low, high) = self.tokens[after - 1 : after + 1], self.scales[after - 1 : after + 1]
        return low + (high - low) * (tokens - a) / (b - a)


def steps_of(sizes: BatchSizes, samples: int) -> int:
    """The steps in which a training reads `samples` samples."""
    return bisect.bisect_left(range(1, samples // min(sizes.start, sizes.total) + 3), samples, key=sizes.before_step)


def read_measured(metrics: Path) -> NoiseCurve:
    """Read the noise scales of a run from its metrics file.

    Raises: DataError if it cannot be read or has none
    """
    found: dict[float, float] = {}
    try:
        with open(metrics, encoding="utf-8", errors="replace") as file:
            for line in file:
                record = _record(line)
                if isinstance(record.get("noise_scale"), (int, float)) and record.get("loss_tokens", 0) > 0:
                    found[float(record["loss_tokens"])] = float(record["noise_scale"])
    except OSError as error:
        raise DataError(f"{metrics} cannot be read: {error.strerror}", hint="name the folder of a run") from None
    if not found:
        hint = "train with train.noise_scale_every; as long as noise hides the gradient there is no value"
        raise DataError(f"{metrics} has no noise_scale", hint=hint)
    tokens = sorted(found)
    return NoiseCurve(tokens, [found[key] for key in tokens])


def _record(line: str) -> dict:
    """Parse a line; empty for a line that a full disk has cut."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def critical_by_law(training: Training) -> Critical:
    """The critical batch by Kaplan et al., at the predicted loss, or at the end at the loss given."""
    end = training.tokens
    return lambda tokens: kaplan_critical(training if tokens >= end else training.after(tokens))


def fit_rampup(critical: Critical, tokens: float, seq_length: int, unit: int) -> BatchSizes:
    """Return the batches, in sequences, that follow the critical batch of a training of `tokens` best: by the mean
    square of log(batch / critical) at equally distant tokens. All are multiples of `unit`.

    The last batch is at most the critical batch at the end, or `unit`.
    """
    points = [(index + 0.5) / GRID * tokens for index in range(GRID)]
    targets = [max(critical(point) / seq_length, 1e-9) for point in points]
    samples = tokens / seq_length
    end = max(unit, math.floor(critical(tokens) / seq_length / unit) * unit)
    candidates = [BatchSizes(end, end, end, 0)]
    for start in sorted({max(unit, end * share // 16 // unit * unit) for share in range(16)}):
        if start < end:
            step = unit * math.ceil((end - start) / unit / MOST_LEVELS)
            total = start + (end - start) // step * step
            candidates += [BatchSizes(total, start, step, math.ceil(samples * share / 10)) for share in range(1, 11)]

    def distance(sizes: BatchSizes) -> float:
        batches = (sizes.at(int(point / seq_length)) for point in points)
        return sum(math.log(batch / target) ** 2 for batch, target in zip(batches, targets, strict=True))

    return min(candidates, key=distance)
