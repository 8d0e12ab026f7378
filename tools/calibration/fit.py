"""A few named efficiencies, fitted on rows by least squares of the logarithms of predicted over measured seconds.

The errors of a source's rows have a part in common, for its clocks and its conventions, of SHARED; the rest is each
row's own and as large as the source's rows scatter: how they differ from each other says more than where they all
stand. Of what is their own n rows say as much as sqrt(n) would, for they are alike. Each efficiency has a usual value,
from which to go by its spread costs as much as an error of one standard deviation. `left_out` holds each source against
what the others say. Profiles that extend another share its efficiencies.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from calibration import ablation
from calibration.rows import Row
from megascale.simulate import profiles
from megascale.simulate.profiles import Hardware, Profile, Stack
from megascale.simulate.step_time import StepParts

Key = tuple[str, str, str]
"""'hardware' or 'stacks', the profile's name, and the efficiency's."""

Values = Mapping[Key, float]

SHARED = 0.04
"""Standard deviation of the error that a source's rows have in common."""

LEAST = 0.015
"""Of the error that is a row's own, however well a source's rows agree: step times are printed with 3 or 4 digits, and
the model is no better.
"""

ROBUST = 2.0
"""Rows that stand further from their source's middle than this, in standard deviations, weigh less: as much as their
distance, not its square.
"""

ROUNDS = 3
"""Linearisations (Gauss-Newton)."""

REFITS = 1
"""Linearisations after a publication is left out; another changed the mean error of the two that were tried
by 0.0003 (bigscience-2022) and 0.002 (fms-fsdp)."""

SOLVES = 20
"""Steps, each half of the way, to weights and values that agree."""

DEVIATION = 1.4826
"""Standard deviations that a normal distribution's median distance from its middle stands for."""

NUDGE = 0.25
"""Spreads by which a value is moved to see what it does."""


@dataclass(frozen=True)
class Efficiency:
    """What is fitted of each profile of a kind: `usual`, give or take a `spread`; between `low` and `high`."""

    kind: str
    name: str
    usual: float
    spread: float
    low: float
    high: float

    def value(self, x: float) -> float:
        """Of x spreads."""
        return min(self.high, max(self.low, self.usual + self.spread * round(x, 6)))


EFFICIENCIES = (
    Efficiency("hardware", "gemm", 0.72, 0.10, 0.3, 0.95),
    Efficiency("stacks", "slowdown", 1.0, 0.13, 0.7, 2.0),
    Efficiency("stacks", "step_s", 0.05, 0.05, 0.0, 0.1),
)

RECENT = Efficiency("hardware", "recent", 1.0, 0.10, 0.8, 1.25)
"""GEMM rate with libraries of RECENT_YEAR or later over that with older ones, where hardware was measured with both."""

FIRST_YEAR, RECENT_YEAR = 2021, 2025

LOSS: Key = ("job", "", "scale_loss")
"""The share of a step that is lost for each doubling of the devices beyond `profiles.SCALE`, in every stack."""

SCALE_LOSS = Efficiency("job", "scale_loss", 0.01, 0.01, 0.0, 0.1)

LARGEST = 1024
"""Devices of the largest jobs that say what is lost to size; larger ones check it."""


class Profiles:
    """The profiles of rows, and what can be fitted of them."""

    def __init__(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        self._hardware = {name: profiles.hardware(name) for name in sorted({row.hardware for row in rows})}
        stacks = {name for row in rows for name in row.stacks}
        self._stacks = {name: profiles.stack(name) for name in sorted(stacks)}
        names = {"hardware": list(self._hardware), "stacks": list(self._stacks)}
        self._root = {(kind, name): root(kind, name) for kind, found in names.items() for name in found}
        roots = sorted({(kind, name) for (kind, _), name in self._root.items()})
        self.keys = [((kind, name, e.name), e) for e in EFFICIENCIES for kind, name in roots if kind == e.kind]
        ages = {(self._root["hardware", row.hardware], self._is_recent(row)) for row in rows}
        both = sorted(name for name, recent in ages if recent and (name, False) in ages)
        self.keys += [(("hardware", name, RECENT.name), RECENT) for name in both]
        self.keys += [(LOSS, SCALE_LOSS)] if any(row.config.world > profiles.SCALE for row in rows) else []

    def of(self, row: Row, values: Values) -> tuple[Hardware, Stack]:
        """A row's hardware and stack."""
        hardware = self._with("hardware", self._hardware[row.hardware], values)
        faster = values.get(("hardware", self._root["hardware", row.hardware], RECENT.name), 1.0)
        if self._is_recent(row) and faster != 1.0:
            share = min(1.0, faster * hardware.attained.gemm_share(RECENT_YEAR))
            hardware = hardware.model_copy(update={"attained": hardware.attained.model_copy(update={"gemm": share})})
        stacks = [self._with("stacks", self._stacks[name], values) for name in row.stacks]
        stack = stacks[0] if row.step is None else ablation.stack(row.step, *stacks)
        return hardware, stack.model_copy(update=row.own)

    def concerns(self, key: Key, row: Row) -> bool:
        """Tell whether a row depends on an efficiency."""
        kind, name, of = key
        if key == LOSS:
            return profiles.SCALE < row.config.world <= LARGEST
        if of == RECENT.name and not self._is_recent(row):
            return False
        return name in [self._root[kind, of] for of in ([row.hardware] if kind == "hardware" else row.stacks)]

    def predicted(self, row: Row, values: Values) -> float:
        """Seconds of a row's step."""
        hardware, stack = self.of(row, values)
        return StepParts(row.config, hardware, stack).step_s

    def _is_recent(self, row: Row) -> bool:
        return self._stacks[row.stacks[0]].generation >= RECENT_YEAR

    def _with(self, kind: str, profile: Profile, values: Values) -> Profile:
        shared = self._root[kind, profile.name]
        own = {of: value for (a, b, of), value in values.items() if (a, b) == (kind, shared) and of != RECENT.name}
        if kind == "stacks" and LOSS in values:
            own["scale_loss"] = values[LOSS]
        return profile.model_copy(update={"attained": profile.attained.model_copy(update=own)})


def root(kind: str, name: str) -> str:
    """The profile that `name` extends in the end, or itself."""
    while base := tomllib.loads(profiles.path_of(kind, name).read_text(encoding="utf-8")).get("extends"):
        name = Path(base).stem
    return name


class Fit:
    """Values for all rows, and what each row says of them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows, self.known = rows, Profiles(rows)
        sources = [row.publication for row in rows]
        self._sources = [np.flatnonzero(np.array(sources) == source) for source in sorted(set(sources))]
        self._x = np.zeros(len(self.known.keys))
        self._low = np.array([(e.low - e.usual) / e.spread for _, e in self.known.keys])
        self._high = np.array([(e.high - e.usual) / e.spread for _, e in self.known.keys])
        for _ in range(ROUNDS):
            self._linearise()
            self._x = self._solved(np.ones(len(rows), dtype=bool))
        self._linearise()

    @property
    def values(self) -> dict[Key, float]:
        return self._values(self._x)

    def left_out(self) -> dict[int, float]:
        """What is predicted for each row, by its line, with values that were fitted without its publication."""
        found: dict[int, float] = {}
        for left in sorted({row.publication for row in self.rows}):
            values = self._values(self._without(left))
            found |= {row.line: self.known.predicted(row, values) for row in self.rows if row.publication == left}
        return found

    def _values(self, x: np.ndarray) -> dict[Key, float]:
        return {key: e.value(each) for (key, e), each in zip(self.known.keys, x, strict=True)}

    def _linearise(self) -> None:
        """Errors at the present values, and their derivatives: a row's by the values of its own profiles. Rows are the
        outer loop, since what is known of a row's pipeline serves all of its derivatives.
        """
        values = self._values(self._x)
        self._errors = np.zeros(len(self.rows))
        self._slopes = np.zeros((len(self.rows), len(self.known.keys)))
        for n, row in enumerate(self.rows):
            self._errors[n] = self._error(row, values)
            for column, (key, e) in enumerate(self.known.keys):
                if self.known.concerns(key, row):
                    moved = {**values, key: e.value(self._x[column] + NUDGE)}
                    self._slopes[n, column] = (self._error(row, moved) - self._errors[n]) / NUDGE

    def _without(self, publication: str) -> np.ndarray:
        """The values that the other rows have, from those of all and their slopes: REFITS linearisations on."""
        others = np.array([row.publication != publication for row in self.rows])
        kept = self._x, self._errors, self._slopes
        for _ in range(REFITS):
            self._x = self._solved(others)
            self._linearise()
        found = self._solved(others)
        self._x, self._errors, self._slopes = kept
        return found

    def _error(self, row: Row, values: Values) -> float:
        return math.log(self.known.predicted(row, values) / row.step_s)

    def _solved(self, chosen: np.ndarray) -> np.ndarray:
        """The values that are best for the chosen rows, if errors were linear."""
        x = self._x
        for _ in range(SOLVES):
            errors = self._errors + self._slopes @ (x - self._x)
            left, right = [np.eye(len(x))], [np.zeros(len(x))]
            for rows in (of[chosen[of]] for of in self._sources):
                if len(rows):
                    white = whitening(errors[rows])
                    left.append(white @ self._slopes[rows])
                    right.append(white @ (self._slopes[rows] @ self._x - self._errors[rows]))
            found = np.linalg.lstsq(np.vstack(left), np.concatenate(right), rcond=None)[0]
            x = np.clip((x + found) / 2, self._low, self._high)
        return x


def whitening(errors: np.ndarray) -> np.ndarray:
    """A matrix that gives the errors of a source's rows deviations of one that are independent: the inverse root of
    D + SHARED^2, where D is the diagonal of their own variances.
    """
    away = np.abs(errors - np.median(errors))
    far = 3 * DEVIATION * float(np.median(away))  # what stands further says no more of the others
    scatter = max(LEAST, float(np.mean(np.minimum(away, far) ** 2)) ** 0.5)
    weights = len(errors) ** -0.25 / (scatter * np.sqrt(np.maximum(1.0, away / (ROBUST * scatter))))
    total = float(weights @ weights)
    common = np.outer(weights, weights**2) / total  # the direction in which all rows move alike
    return np.diag(weights) - (1 - 1 / math.sqrt(1 + SHARED**2 * total)) * common


def mean_error(rows: Iterable[Row], predictions: Mapping[int, float]) -> float:
    """Mean absolute relative error of step time."""
    return mean(abs(predictions[row.line] / row.step_s - 1) for row in rows)
