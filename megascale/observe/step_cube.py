"""The times of a run's steps as an array, rank x step x part, from the tables of the event store.

`StepCube.from_tables` reads `step_parts`, `steps` and `ranks` (`eventstore.schema`); all other analyses read the cube.
An action's own time is its duration without the waits inside it: a rank that computes longer differs in its own time
from a rank that waits for it. A step that several attempts have run counts in the last attempt.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megascale.core.events import COMPUTE
from megascale.eventstore.schema import HOST_AXIS, STEP_AXIS
from megascale.layout.topology import AXES, DATA_AXES

Floats = npt.NDArray[Any]
Integers = npt.NDArray[Any]
Booleans = npt.NDArray[Any]
Columns = Mapping[str, npt.NDArray[Any]]
"""A table's columns by name, as DuckDB's `fetchnumpy` returns them."""

OTHER = "other"
"""Name of the host's part of a step outside of all recorded actions, waits and activities."""

SETTLED_TAGS = frozenset({"first step", "gc", "evaluation", "checkpoint", "restart"})
"""Tags of steps that are left out of comparisons between ranks: known causes explain their time."""

COLD_TAGS = frozenset({"first step", "restart"})
"""Tags of steps that compile, open connections, and fill caches."""

REDUCTIONS = frozenset({"reduce_scatter", "all_reduce"})
"""Collectives that reduce gradients over the data-parallel axis."""


class Part(NamedTuple):
    """A part of a step: an action, the communication of an axis by operation, or an activity of the host."""

    axis: str
    name: str
    chunk: int = -1

    @property
    def is_wait(self) -> bool:
        """True for communication, in whose time compute may wait."""
        return self.axis not in (COMPUTE, HOST_AXIS)

    def __str__(self) -> str:
        name = f"{self.axis} {self.name}" if self.is_wait else self.name
        return f"{name} of chunk {self.chunk}" if self.chunk >= 0 and self.axis == COMPUTE else name


@dataclass(frozen=True)
class Places:
    """The ranks of a cube in ascending order: `rank`, `node` (an index of `nodes`), and `coords` [R] by axis."""

    rank: Integers
    node: Integers
    nodes: tuple[str, ...]
    coords: Mapping[str, Integers]

    @classmethod
    def from_table(cls, ranks: Columns) -> Places:
        """Read the ranks of the last attempt in the table `ranks`."""
        attempt = np.asarray(ranks["attempt"])
        last = np.flatnonzero(attempt == attempt.max(initial=0))
        last = last[np.argsort(np.asarray(ranks["rank"])[last])]
        nodes, node = np.unique(np.asarray(ranks["node"])[last].astype(str), return_inverse=True)
        coords = {axis: np.asarray(ranks[axis])[last] for axis in AXES}
        return cls(np.asarray(ranks["rank"])[last], node, tuple(map(str, nodes)), coords)

    def index(self, ranks: Integers) -> Integers:
        """Return the positions of `ranks`; -1 for unknown ranks."""
        position = np.searchsorted(self.rank, ranks).clip(max=max(0, len(self.rank) - 1))
        return np.where(self.rank[position] == ranks, position, -1) if len(self.rank) else position - 1

    def codes(self, *axes: str) -> Integers:
        """Return a code for each rank, equal for ranks with equal coordinates on `axes`."""
        code = np.zeros(len(self.rank), np.int64)
        for axis in axes:
            code = code * (int(self.coords[axis].max(initial=0)) + 1) + self.coords[axis]
        return code

    def group_codes(self, axis: str) -> Integers:
        """Return a code for each rank, equal for the ranks of a communication group along `axis`."""
        along = {"dp": DATA_AXES}.get(axis, (axis,))
        return self.codes(*(other for other in AXES if other not in along)) if along[0] in AXES else self.codes()


@dataclass(frozen=True)
class StepCube:
    """Times of R ranks in S steps and P parts, in seconds.

    `own` [R, S, P]: of an action without the waits inside it, of a host activity without what the device hides, of a
    communication its duration. `wait` [R, S, P]: time in which compute waited for a communication, else 0. `wall`
    [R, S]: the step without evaluations and saves after it, 0 if unknown. `ordinary` [R, S]: no settled tags. `warm`
    [S]: not the first step of an attempt. `entered_ns` [R, S]: issue of the last reduction of gradients, ns since 1970,
    or 0. `bytes` [R, P]: mean of a step. `tokens`, `flops` [S]: of the job. `forwards`: of a rank in a step.
    """

    places: Places
    steps: Integers
    parts: tuple[Part, ...]
    own: Floats
    wait: Floats
    wall: Floats
    ordinary: Booleans
    warm: Booleans
    entered_ns: Integers
    bytes: Floats
    tokens: Floats
    flops: Floats
    forwards: int

    @classmethod
    def from_tables(cls, step_parts: Columns, steps: Columns, ranks: Columns) -> StepCube:
        """Build the cube of all steps in the table `steps`."""
        places = Places.from_table(ranks)
        numbers = np.unique(np.asarray(steps["step"]))
        attempt_of = np.full(len(numbers), -1)
        np.maximum.at(attempt_of, np.searchsorted(numbers, steps["step"]), np.asarray(steps["attempt"]))
        at, rank, step = _cells(steps, places, numbers, attempt_of)
        shape = len(places.rank), len(numbers)
        wall, ordinary, warm = np.zeros(shape, np.float32), np.zeros(shape, bool), np.ones(len(numbers), bool)
        wall[rank, step] = np.asarray(steps["train_ns"])[at] / 1e9
        tokens, flops = np.zeros(len(numbers)), np.zeros(len(numbers))
        tokens[step], flops[step] = np.asarray(steps["tokens"])[at], np.asarray(steps["flops"])[at]
        tags, code = _factorize(steps["tags"])
        settled, cold = (
            np.array([not names.isdisjoint(tag.split(",")) for (tag,) in tags], bool)[code][at]
            for names in (SETTLED_TAGS, COLD_TAGS)
        )
        ordinary[rank, step], warm[step[cold]] = ~settled, False
        at, rank, step = _cells(step_parts, places, numbers, attempt_of)
        keys, code = _factorize(*(step_parts[name] for name in ("axis", "name", "chunk")))
        parts = tuple(Part(*key) for key in keys if key[0] != STEP_AXIS)
        part = np.array([parts.index(Part(*key)) if key[0] != STEP_AXIS else -1 for key in keys], np.int64)[code][at]
        at, rank, step, part = (column[part >= 0] for column in (at, rank, step, part))
        total, exposed = (np.asarray(step_parts[name])[at] / 1e9 for name in ("total_ns", "exposed_ns"))
        compute, host = (np.array([part.axis == axis for part in parts], bool)[part] for axis in (COMPUTE, HOST_AXIS))
        own, wait = np.zeros((*shape, len(parts)), np.float32), np.zeros((*shape, len(parts)), np.float32)
        own[rank, step, part] = np.where(compute, total - exposed, np.where(host, exposed, total))
        wait[rank, step, part] = np.where(compute | host, 0.0, exposed)
        entered = np.zeros(shape, np.int64)
        reduces = np.array([part.axis == "dp" and part.name in REDUCTIONS for part in parts], bool)[part]
        issued = np.asarray(step_parts["last_issue_ns"])[at][reduces]
        np.maximum.at(entered, (rank[reduces], step[reduces]), issued)
        cell = rank * len(parts) + part
        size = np.bincount(cell, np.asarray(step_parts["bytes"])[at], shape[0] * len(parts)) / max(1, len(numbers))
        forward = [index for index, part in enumerate(parts) if part[:2] == (COMPUTE, "F")]
        counts = (np.asarray(step_parts["count"])[at][part == index] for index in forward)
        forwards = round(sum(float(np.median(count)) for count in counts))
        return cls(
            places,
            numbers,
            parts,
            own,
            wait,
            wall,
            ordinary,
            warm,
            entered,
            size.reshape(shape[0], len(parts)),
            tokens,
            flops,
            forwards,
        )

    def take(self, steps: slice | Booleans | Integers) -> StepCube:
        """Return the cube of some steps, by position."""
        names = ("own", "wait", "wall", "ordinary", "entered_ns")
        of_step = {name: getattr(self, name)[steps] for name in ("steps", "warm", "tokens", "flops")}
        return replace(self, **of_step, **{name: getattr(self, name)[:, steps] for name in names})

    def select(self, axis: str, *names: str) -> list[int]:
        """Return the positions of the parts of `axis`, of some `names` or all."""
        return [at for at, part in enumerate(self.parts) if part.axis == axis and (not names or part.name in names)]

    def own_of(self, axis: str, *names: str) -> Floats:
        """Return the summed own time of parts, [R, S]."""
        return self.own[:, :, self.select(axis, *names)].sum(2)

    def wait_of(self, axis: str, *names: str) -> Floats:
        """Return the summed wait for the communication of an axis, [R, S]."""
        return self.wait[:, :, self.select(axis, *names)].sum(2)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Axes with communication."""
        return tuple(dict.fromkeys(part.axis for part in self.parts if part.is_wait))

    @cached_property
    def compute(self) -> Floats:
        """Own time of all actions, [R, S]."""
        return self.own_of(COMPUTE)

    @cached_property
    def data(self) -> Floats:
        """Time in which a step's batch was read, [R, S]."""
        return self.own_of(HOST_AXIS, "data")

    @cached_property
    def gc(self) -> Floats:
        """Pauses for garbage collection, [R, S]."""
        return self.own_of(HOST_AXIS, "gc")

    @cached_property
    def other(self) -> Floats:
        """Time of a step in no action, wait, reading of data or pause, [R, S]: the host, or what was not recorded."""
        return np.maximum(0.0, self.wall - self.compute - self.wait.sum(2) - self.data - self.gc)

    def mean(self, values: Floats) -> Floats:
        """Return means over ordinary steps of `values` [R, S, ...]; 0 for a rank without ordinary steps."""
        weight = self.ordinary.reshape(*self.ordinary.shape, *[1] * (values.ndim - 2))
        return np.asarray((values * weight).sum(1, dtype=np.float64) / np.maximum(1, weight.sum(1)))

    @cached_property
    def ordinary_steps(self) -> Booleans:
        """Steps that are ordinary on some rank, [S]."""
        return np.asarray(self.ordinary.any(0))

    @cached_property
    def step_s(self) -> float:
        """Mean time of an ordinary step."""
        return float(self.wall[self.ordinary].mean()) if self.ordinary.any() else 0.0


def _cells(table: Columns, places: Places, steps: Integers, attempt_of: Integers) -> tuple[Integers, ...]:
    """Return the rows that belong to a known rank and the last attempt of a step, with their rank and step."""
    rank, number = places.index(np.asarray(table["rank"])), np.asarray(table["step"])
    step = np.searchsorted(steps, number).clip(max=max(0, len(steps) - 1))
    known = (rank >= 0) & (steps[step] == number) if len(steps) else np.zeros(len(number), bool)
    known &= attempt_of[step] == table["attempt"] if len(steps) else False
    at = np.flatnonzero(known)
    return at, rank[at], step[at]


def _factorize(*columns: npt.NDArray[Any]) -> tuple[list[tuple], Integers]:
    """Return the distinct rows of some columns, and each row's index among them."""
    code, values = np.zeros(len(columns[0]), np.int64), list[list]()
    for column in columns:
        values.append(sorted(set(column.tolist())))
        index = {value: at for at, value in enumerate(values[-1])}
        code = code * len(index) + np.fromiter(map(index.__getitem__, column.tolist()), np.int64, len(column))
    rows = list(itertools.product(*values))
    there = np.flatnonzero(np.bincount(code, minlength=len(rows)))
    of_code = np.zeros(len(rows), np.int64)
    of_code[there] = np.arange(len(there))
    return [rows[at] for at in there], of_code[code]
