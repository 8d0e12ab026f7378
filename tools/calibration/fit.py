"""A few named efficiencies, fitted on rows by least squares of the logarithms of predicted over measured seconds.

Each efficiency has a usual value, which it keeps where no row speaks against it: to leave it by its spread costs as
much as one row that is off by ERROR. A source of n rows weighs as much as sqrt(n) rows, those kept `aside`
nothing. `left_out` holds each source against what the others say. Profiles that extend another share its efficiencies.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from calibration import ablation
from calibration.rows import Row
from megascale.plan import profiles
from megascale.plan.estimate import Known, step_time
from megascale.plan.profiles import Hardware, Profile, Stack
from megascale.plan.steps import Steps

Key = tuple[str, str, str]
"""'hardware' or 'stacks', the profile's name, and the efficiency's."""

Values = Mapping[Key, float]

ERROR = 0.05
"""Of a row, to which spreads are compared."""

ROBUST = 2.0
"""Rows that are off by more errors than this weigh less: as much as their distance, not its square."""

ROUNDS = 3
"""Linearisations (Gauss-Newton)."""

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
        return min(self.high, max(self.low, self.usual + self.spread * x))


EFFICIENCIES = (
    Efficiency("hardware", "gemm", 0.72, 0.10, 0.3, 0.95),
    Efficiency("hardware", "memory", 0.75, 0.15, 0.3, 1.0),
    Efficiency("hardware", "link", 0.70, 0.15, 0.2, 1.0),
    Efficiency("hardware", "network", 0.70, 0.15, 0.1, 1.0),
    Efficiency("hardware", "hiding", 0.75, 0.15, 0.2, 1.0),
    Efficiency("stacks", "slowdown", 1.0, 0.1, 0.7, 2.0),
    Efficiency("stacks", "passes", 1.2, 0.4, 0.5, 6.0),
    Efficiency("stacks", "step_s", 0.1, 1.0, 0.0, 5.0),
)


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
        self._same: dict[int, Known] = {}  # by line what no efficiency changes
        self.keys = [((kind, name, e.name), e) for e in EFFICIENCIES for kind, name in roots if kind == e.kind]

    def of(self, row: Row, values: Values) -> tuple[Hardware, Stack]:
        """A row's hardware and stack."""
        hardware = self._with("hardware", self._hardware[row.hardware], values)
        stacks = [self._with("stacks", self._stacks[name], values) for name in row.stacks]
        stack = stacks[0] if row.step is None else ablation.stack(row.step, *stacks)
        return hardware, stack.model_copy(update=row.own)

    def concerns(self, key: Key, row: Row) -> bool:
        """Whether a row depends on an efficiency."""
        kind, name, _ = key
        return name in [self._root[kind, of] for of in ([row.hardware] if kind == "hardware" else row.stacks)]

    def predicted(self, row: Row, values: Values) -> float:
        """Seconds of a row's step."""
        hardware, stack = self.of(row, values)
        if row.line not in self._same:
            self._same[row.line] = Steps(hardware, stack).known(row.config)
        return step_time(row.config, hardware, stack, self._same[row.line])

    def _with(self, kind: str, profile: Profile, values: Values) -> Profile:
        shared = self._root[kind, profile.name]
        own = {of: value for (a, b, of), value in values.items() if (a, b) == (kind, shared)}
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
        counts = Counter(row.source for row in rows if not row.aside)
        self._weights = np.array([0.0 if row.aside else counts[row.source] ** -0.25 for row in rows])
        self._x = np.zeros(len(self.known.keys))
        for _ in range(ROUNDS):
            self._linearise()
            self._x = self._solved(np.ones(len(rows), dtype=bool))
        self._linearise()

    @property
    def values(self) -> dict[Key, float]:
        return self._values(self._x)

    def left_out(self) -> dict[int, float]:
        """What is predicted for each row, by its line, with values that were fitted without its source. How errors
        depend on values is taken from the fit of all rows.
        """
        found: dict[int, float] = {}
        for source in sorted({row.source for row in self.rows}):
            others = np.array([row.source != source for row in self.rows])
            values = self._values(self._solved(others))
            found |= {row.line: self.known.predicted(row, values) for row in self.rows if row.source == source}
        return found

    def _values(self, x: np.ndarray) -> dict[Key, float]:
        return {key: e.value(each) for (key, e), each in zip(self.known.keys, x, strict=True)}

    def _linearise(self) -> None:
        """Errors at the present values, and their derivatives: a row's by the values of its own profiles."""
        values = self._values(self._x)
        self._errors = np.array([self._error(row, values) for row in self.rows])
        self._slopes = np.zeros((len(self.rows), len(self.known.keys)))
        for column, (key, e) in enumerate(self.known.keys):
            moved = {**values, key: e.value(self._x[column] + NUDGE)}
            for n, row in enumerate(self.rows):
                if self.known.concerns(key, row):
                    self._slopes[n, column] = (self._error(row, moved) - self._errors[n]) / NUDGE

    def _error(self, row: Row, values: Values) -> float:
        return math.log(self.known.predicted(row, values) / row.step_s) / ERROR

    def _solved(self, chosen: np.ndarray) -> np.ndarray:
        """The values that are best for the chosen rows, if errors were linear."""
        x = self._x
        for _ in range(10):
            errors = self._errors + self._slopes @ (x - self._x)
            weights = self._weights * chosen / np.sqrt(np.maximum(1.0, np.abs(errors) / ROBUST))
            left = np.vstack([weights[:, None] * self._slopes, np.eye(len(x))])
            right = np.concatenate([weights * (self._slopes @ self._x - self._errors), np.zeros(len(x))])
            x = np.linalg.lstsq(left, right, rcond=None)[0]
        return x


def mean_error(rows: Iterable[Row], predictions: Mapping[int, float]) -> float:
    """Mean absolute relative error of step time."""
    return mean(abs(predictions[row.line] / row.step_s - 1) for row in rows)
