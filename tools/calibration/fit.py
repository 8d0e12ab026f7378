"""Fit of a few named efficiencies by least squares of log(predicted / measured) step time.

Error model: the rows of a source share an error of standard deviation SHARED (clocks, conventions), and every row has
an independent error, estimated from the scatter of the source's rows. n similar rows weigh as much as sqrt(n) rows.
Every efficiency has a prior: mean `usual`, standard deviation `spread`. Profiles that extend another share its values.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

import numpy as np

from calibration import ablation
from calibration.rows import Row
from megascale.config import profile_files
from megascale.plan.simulate import profiles
from megascale.plan.simulate.profiles import Hardware, Stack
from megascale.plan.simulate.step_time import StepParts

Key = tuple[str, str, str]
"""'hardware' or 'stacks', the profile's name, and the efficiency's."""

Values = Mapping[Key, float]

Profile = TypeVar("Profile", Hardware, Stack)

SHARED = 0.04
"""Standard deviation of the error shared by a source's rows."""

LEAST = 0.015
"""Lower bound of a row's independent error: step times are printed with 3 or 4 digits, and the model is no better."""

ROBUST = 2.0
"""Distance from the source's median, in standard deviations, above which errors count linearly, not squared."""

ROUNDS = 3
"""Number of linearisations (Gauss-Newton)."""

REFITS = 1
"""Number of linearisations after a publication is left out. A second changed the mean error by 0.0003
(bigscience-2022) and 0.002 (fms-fsdp)."""

SOLVES = 20
"""Number of damped steps to consistent weights and values."""

DEVIATION = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""

NUDGE = 0.25
"""Step of the finite differences, in spreads."""


@dataclass(frozen=True)
class Efficiency:
    """An efficiency of every profile of a kind: prior mean `usual`, standard deviation `spread`, bounds."""

    kind: str
    name: str
    usual: float
    spread: float
    low: float
    high: float

    def value(self, x: float) -> float:
        """Return the value at `x` spreads from the prior mean, within the bounds."""
        return min(self.high, max(self.low, self.usual + self.spread * round(x, 6)))


EFFICIENCIES = (
    Efficiency("hardware", "gemm", 0.72, 0.10, 0.3, 0.95),
    Efficiency("stacks", "slowdown", 1.0, 0.13, 0.7, 2.0),
    Efficiency("stacks", "step_s", 0.05, 0.05, 0.0, 0.1),
)

RECENT = Efficiency("hardware", "recent", 1.0, 0.10, 0.8, 1.25)
"""GEMM rate with libraries of RECENT_YEAR or later divided by the rate with older libraries."""

FIRST_YEAR, RECENT_YEAR = 2021, 2025

LOSS: Key = ("job", "", "scale_loss")
"""Share of a step lost per doubling of the devices beyond `profiles.LARGE_JOB`, in every stack."""

SCALE_LOSS = Efficiency("job", "scale_loss", 0.01, 0.01, 0.0, 0.1)

LARGEST = 1024
"""Number of devices up to which jobs are used to fit the loss with size; larger jobs check the fit."""


class Profiles:
    """Profiles of the rows, and the keys of the fitted efficiencies."""

    def __init__(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        self._hardware = {name: profiles.hardware(name) for name in sorted({row.hardware for row in rows})}
        stacks = {name for row in rows for name in row.stacks}
        self._stacks = {name: profiles.stack(name) for name in sorted(stacks)}
        names = {"hardware": list(self._hardware), "stacks": list(self._stacks)}
        self._root = {(kind, name): root(kind, name) for kind, members in names.items() for name in members}
        roots = sorted({(kind, name) for (kind, _), name in self._root.items()})
        self.keys = [((kind, name, e.name), e) for e in EFFICIENCIES for kind, name in roots if kind == e.kind]
        ages = {(self._root["hardware", row.hardware], self._is_recent(row)) for row in rows}
        both = sorted(name for name, recent in ages if recent and (name, False) in ages)
        self.keys += [(("hardware", name, RECENT.name), RECENT) for name in both]
        self.keys += [(LOSS, SCALE_LOSS)] if any(row.config.world_size > profiles.LARGE_JOB for row in rows) else []
        self._kept, self._first = dict[int, dict[str, Any]](), tuple[Any, ...]()

    def of(self, row: Row, values: Values) -> tuple[Hardware, Stack]:
        """Return a row's hardware and stack with fitted values."""
        hardware = self._with("hardware", self._hardware[row.hardware], values)
        faster = values.get(("hardware", self._root["hardware", row.hardware], RECENT.name), 1.0)
        if self._is_recent(row) and faster != 1.0:
            share = min(1.0, faster * hardware.attained.gemm_share(RECENT_YEAR))
            hardware = hardware.model_copy(update={"attained": hardware.attained.model_copy(update={"gemm": share})})
        stacks = [self._with("stacks", self._stacks[name], values) for name in row.stacks]
        stack = stacks[0] if row.step is None else ablation.stack(row.step, *stacks)
        return hardware, stack.model_copy(update=row.own)

    def concerns(self, key: Key, row: Row) -> bool:
        """Return True if a row depends on an efficiency."""
        kind, name, of = key
        if key == LOSS:
            return profiles.LARGE_JOB < row.config.world_size <= LARGEST
        if of == RECENT.name and not self._is_recent(row):
            return False
        return name in [self._root[kind, of] for of in ([row.hardware] if kind == "hardware" else row.stacks)]

    def predicted(self, row: Row, values: Values) -> float:
        """Predict the step time of a row in seconds. No efficiency changes the sizes of buckets, or AdamW's update;
        a pipeline is simulated again for those of its actions.
        """
        hardware, stack = self.of(row, values)
        parts = StepParts(row.config, hardware, stack)
        vars(parts).update(self._kept.get(row.line, {}))  # as if they had been asked for
        actions = stack.attained.model_copy(update={"step_s": 0.0, "scale_loss": 0.0})
        plan = row.line, hardware, stack.model_copy(update={"attained": actions})
        pipeline = self._first[-1] if self._first[:-1] == plan else parts.pipeline_s(parts.times)
        if self._first[:1] != plan[:1]:
            self._first = *plan, pipeline
        seconds = parts.seconds(pipeline)
        self._kept[row.line] = {name: getattr(parts, name) for name in ("modules", "slowest_update")}
        return seconds

    def _is_recent(self, row: Row) -> bool:
        return self._stacks[row.stacks[0]].generation >= RECENT_YEAR

    def _with(self, kind: str, profile: Profile, values: Values) -> Profile:
        shared = self._root[kind, profile.name]
        attained = {of: value for (a, b, of), value in values.items() if (a, b) == (kind, shared) and of != RECENT.name}
        if kind == "stacks" and LOSS in values:
            attained["scale_loss"] = values[LOSS]
        return profile.model_copy(update={"attained": profile.attained.model_copy(update=attained)})


def root(kind: str, name: str) -> str:
    """Return the profile at the end of the chain of `extends`, or `name` itself."""
    while base := tomllib.loads(profile_files.path_of(kind, name).read_text(encoding="utf-8")).get("extends"):
        name = Path(base).stem
    return name


class Fit:
    """Efficiencies fitted to all rows, with the residuals and derivatives of every row."""

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
        """Predict every row, by line number, with values fitted without the row's publication."""
        predictions: dict[int, float] = {}
        for name in sorted({row.publication for row in self.rows}):
            values = self._values(self._without(name))
            predictions |= {row.line: self.known.predicted(row, values) for row in self.rows if row.publication == name}
        return predictions

    def _values(self, x: np.ndarray) -> dict[Key, float]:
        return {key: e.value(spreads) for (key, e), spreads in zip(self.known.keys, x, strict=True)}

    def _linearise(self) -> None:
        """Compute the errors at the present values, and their derivatives by the values of the row's profiles. Rows are
        the outer loop, to reuse the cached pipeline of a row for all its derivatives.
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
        """Fit without a publication, starting from the fit to all rows, with REFITS further linearisations."""
        included = np.array([row.publication != publication for row in self.rows])
        saved = self._x, self._errors, self._slopes
        for _ in range(REFITS):
            self._x = self._solved(included)
            self._linearise()
        solution = self._solved(included)
        self._x, self._errors, self._slopes = saved
        return solution

    def _error(self, row: Row, values: Values) -> float:
        return math.log(self.known.predicted(row, values) / row.step_s)

    def _solved(self, chosen: np.ndarray) -> np.ndarray:
        """Return the optimum for the chosen rows in the linear approximation."""
        x = self._x
        for _ in range(SOLVES):
            errors = self._errors + self._slopes @ (x - self._x)
            left, right = [np.eye(len(x))], [np.zeros(len(x))]
            for rows in (of[chosen[of]] for of in self._sources):
                if len(rows):
                    white = whitening(errors[rows])
                    left.append(white @ self._slopes[rows])
                    right.append(white @ (self._slopes[rows] @ self._x - self._errors[rows]))
            solution = np.linalg.lstsq(np.vstack(left), np.concatenate(right), rcond=None)[0]
            x = np.clip((x + solution) / 2, self._low, self._high)
        return x


def whitening(errors: np.ndarray) -> np.ndarray:
    """Return the whitening matrix of a source's errors: the inverse square root of the covariance D + SHARED^2, with D
    the diagonal of the independent variances.
    """
    distance = np.abs(errors - np.median(errors))
    cutoff = 3 * DEVIATION * float(np.median(distance))  # outliers must not inflate the scatter
    scatter = max(LEAST, float(np.mean(np.minimum(distance, cutoff) ** 2)) ** 0.5)
    weights = len(errors) ** -0.25 / (scatter * np.sqrt(np.maximum(1.0, distance / (ROBUST * scatter))))
    total = float(weights @ weights)
    common = np.outer(weights, weights**2) / total  # the direction of the shared error
    return np.diag(weights) - (1 - 1 / math.sqrt(1 + SHARED**2 * total)) * common


def mean_error(rows: Iterable[Row], predictions: Mapping[int, float]) -> float:
    """Mean absolute relative error of step time."""
    return mean(abs(predictions[row.line] / row.step_s - 1) for row in rows)
