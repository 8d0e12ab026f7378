"""The times of a run's steps as an array, rank x step x part, from the tables of the event store.

`StepCube.from_tables` reads `step_parts`, `steps` and `ranks` (`store.schema`); all other analyses read the cube.
An action's own time is its duration without the waits inside it: a rank that computes longer differs in its own time
from a rank that waits for it. A step that several attempts have run counts in the last attempt. Steps from before a
rank moved, to another node or place in the layout, are left out: they were other machines.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megascale.layout.topology import AXES, DATA_AXES
from megascale.operate.store.schema import COLD_TAGS, COMMON, STEP_AXIS
from megascale.record.events import COMPUTE, HOST_AXIS, PAUSE
from megascale.schedule.ir import Kind

Floats = npt.NDArray[Any]
Integers = npt.NDArray[Any]
Booleans = npt.NDArray[Any]
Columns = Mapping[str, npt.NDArray[Any]]
"""A table's columns by name, as DuckDB's `fetchnumpy` returns them."""

OTHER = "other"
"""Name of the host's part of a step outside of all recorded actions, waits and activities."""

CLASS_TAGS = frozenset({"gc", "evaluation", "checkpoint"})
"""Tags of steps that a known cause has made longer: these are not compared with the others, unless they are common."""

MAD_TO_DEVIATION = 1.4826
"""Standard deviations of a normal distribution in a median absolute deviation."""

REDUCTIONS = frozenset({("dp", "reduce_scatter"), ("dp", "all_reduce")})
"""Axis and name of the collectives that reduce gradients."""


def lower_median(values: Floats) -> Floats:
    """Return the median over the first dimension of the values that are known, not NaN; of an even number of values the
    lower one, so that of two ranks the slower one differs.
    """
    if np.isnan(values).any():  # NaN come last
        middle = np.maximum(0, (~np.isnan(values)).sum(0) - 1) // 2
        return np.asarray(np.take_along_axis(np.sort(values, 0), np.asarray(middle)[None], 0)[0])
    middle = (len(values) - 1) // 2
    return np.asarray(np.partition(values, middle, 0)[middle])


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
    """The ranks of a cube in ascending order: `rank`, `node` (an index of `nodes`), and `coords` [R] by axis.
    `crowded`: hosts with fewer cores than ranks of the job: name, ranks, cores.
    """

    rank: Integers
    node: Integers
    nodes: tuple[str, ...]
    coords: Mapping[str, Integers]
    crowded: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def from_table(cls, ranks: Columns) -> Places:
        """Read the ranks of the last attempt in the table `ranks`."""
        attempt = np.asarray(ranks["attempt"])
        last = np.flatnonzero(attempt == attempt.max(initial=0))
        last = last[np.argsort(np.asarray(ranks["rank"])[last])]
        nodes, node = np.unique(np.asarray(ranks["node"])[last].astype(str), return_inverse=True)
        coords = {axis: np.asarray(ranks[axis])[last] for axis in AXES}
        crowded = _crowded({name: column[last] for name, column in ranks.items()}) if "cores" in ranks else ()
        return cls(np.asarray(ranks["rank"])[last], node, tuple(map(str, nodes)), coords, crowded)

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


def _crowded(ranks: Columns) -> tuple[tuple[str, int, int], ...]:
    """Return the hosts with fewer cores than ranks. Agents on one host count its cores alike; 0: not known."""
    hosts, host, count = np.unique(np.asarray(ranks["host"]).astype(str), return_inverse=True, return_counts=True)
    cores = np.zeros(len(hosts), int)
    np.maximum.at(cores, host, np.ma.filled(ranks["cores"], 0))
    few = np.flatnonzero((cores > 0) & (cores < count))
    return tuple((str(hosts[at]), int(count[at]), int(cores[at])) for at in few)


def first_alike(ranks: Columns) -> int:
    """Return the first attempt since which every rank has been on its present node and in its present place of the
    layout, by the table `ranks`: a replaced node, or a layout that shrank, makes ranks of other machines.
    """
    attempt, rank = np.asarray(ranks["attempt"]), np.asarray(ranks["rank"])
    if not (attempt < attempt.max(initial=0)).any():
        return 0
    now = np.flatnonzero(attempt == attempt.max())
    now = now[np.argsort(rank[now])]
    at = now[np.searchsorted(rank[now], rank).clip(max=len(now) - 1)]
    moved = rank[at] == rank
    moved &= np.logical_or.reduce([np.asarray(ranks[name])[at] != ranks[name] for name in ("node", "world", *AXES)])
    return int(attempt[moved].max(initial=-1)) + 1


@dataclass(frozen=True)
class StepCube:
    """Times of R ranks in S steps and P parts, in seconds.

    `own` [R, S, P]: of an action without the waits inside it, of a host activity without what the device hides, of a
    pause or a communication its duration. `wait` [R, S, P]: time in which compute waited for a communication, else 0.
    `wall` [R, S]: the step without evaluations and saves after it, 0 if unknown. `ordinary` [R, S]: warm, and without a
    rare tag. `warm` [S]: not the first step of an attempt. `entered_ns` [R, S]: issue of the last reduction of
    gradients, ns since 1970, or 0. `bytes` [R, P]: mean of a step. `tokens`, `flops` [S]: of the job. `forwards`: of a
    rank in a step.
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
    def from_tables(
        cls, step_parts: Columns, steps: Columns, ranks: Columns, parts: Sequence[Part] | None = None
    ) -> StepCube:
        """Build the cube of the steps in the table `steps` since `first_alike`. `parts`: with a column `part` of
        indices in the place of the texts in `step_parts`.
        """
        places, numbers = Places.from_table(ranks), np.unique(np.asarray(steps["step"]))
        attempts = np.full(len(numbers), -1)
        np.maximum.at(attempts, np.searchsorted(numbers, steps["step"]), np.asarray(steps["attempt"]))
        alike = attempts >= first_alike(ranks)
        numbers, attempts = numbers[alike], attempts[alike]
        of_steps, of_parts = (_Rows.of_table(table, places, numbers, attempts) for table in (steps, step_parts))
        shape = len(places.rank), len(numbers)
        return cls(places, numbers, **_step_arrays(of_steps, shape), **_part_arrays(of_parts, shape, parts))

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
    def paused(self) -> Floats:
        """Time in which the process did nothing, inside of other parts, [R, S]; without that of garbage collections,
        which hold Python's lock.
        """
        return np.maximum(0.0, self.own_of(HOST_AXIS, PAUSE) - self.gc)

    @cached_property
    def other(self) -> Floats:
        """Time of a step in no action, wait, reading of data or pause, [R, S]: the host, or what was not recorded."""
        return np.maximum(0.0, self.wall - self.compute - self.wait.sum(2) - self.data - self.gc)

    def mean(self, values: Floats) -> Floats:
        """Return means over ordinary steps of `values` [R, S, ...]; NaN for a rank without ordinary steps."""
        weight = self.ordinary.reshape(*self.ordinary.shape, *[1] * (values.ndim - 2))
        total, count = (values * weight).sum(1, dtype=np.float64), weight.sum(1)
        return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)

    @cached_property
    def ordinary_steps(self) -> Booleans:
        """Steps that are ordinary on some rank, [S]: a pause of all ranks at once is planned, one of some is a loss."""
        return np.asarray(self.ordinary.any(0))

    def within(self, ends: Sequence[int]) -> Booleans:
        """Return which steps are ordinary and between two numbers, both included, [S]."""
        return np.asarray(self.ordinary_steps & (self.steps >= ends[0]) & (self.steps <= ends[1]))

    @cached_property
    def step_s(self) -> float:
        """Mean time of an ordinary step; of any step, if none is ordinary."""
        known = self.ordinary if self.ordinary.any() else self.wall > 0
        return float(self.wall[known].mean()) if known.any() else 0.0


class _Rows(NamedTuple):
    """The rows of a table that belong to known ranks, and to the last attempt of a step; with their rank and step by
    position.
    """

    table: Columns
    at: Integers
    rank: Integers
    step: Integers

    @classmethod
    def of_table(cls, table: Columns, places: Places, steps: Integers, attempts: Integers) -> _Rows:
        rank, number = places.index(np.asarray(table["rank"])), np.asarray(table["step"])
        if not len(steps):
            return cls(table, number[:0], rank[:0], number[:0])
        step = np.searchsorted(steps, number).clip(max=len(steps) - 1)
        at = np.flatnonzero((rank >= 0) & (steps[step] == number) & (attempts[step] == table["attempt"]))
        return cls(table, at, rank[at], step[at])

    def column(self, name: str) -> npt.NDArray[Any]:
        return np.asarray(self.table[name])[self.at]

    def take(self, chosen: Booleans) -> _Rows:
        return self._replace(at=self.at[chosen], rank=self.rank[chosen], step=self.step[chosen])


def _step_arrays(rows: _Rows, shape: tuple[int, int]) -> dict[str, Any]:
    """Return the fields of a cube that the table `steps` has."""
    wall, ordinary, warm = np.zeros(shape, np.float32), np.zeros(shape, bool), np.ones(shape[1], bool)
    tokens, flops = np.zeros(shape[1]), np.zeros(shape[1])
    wall[rows.rank, rows.step] = rows.column("train_ns") / 1e9
    tokens[rows.step], flops[rows.step] = rows.column("tokens"), rows.column("flops")
    tags, code = _factorize(rows.column("tags"))
    named = [frozenset(tag.split(",")) for (tag,) in tags]
    cold = np.array([not names.isdisjoint(COLD_TAGS) for names in named], bool)[code]
    warm[rows.step[cold]] = False
    counts = np.bincount(code[warm[rows.step]], minlength=len(named))
    rare = {tag for tag in CLASS_TAGS if counts[[tag in names for names in named]].sum() < COMMON * counts.sum()}
    like = np.array([rare.isdisjoint(names) for names in named], bool)[code]
    ordinary[rows.rank, rows.step] = like & warm[rows.step]
    return {"wall": wall, "ordinary": ordinary, "warm": warm, "tokens": tokens, "flops": flops}


def _part_arrays(rows: _Rows, shape: tuple[int, int], known: Sequence[Part] | None) -> dict[str, Any]:
    """Return the fields of a cube that the table `step_parts` has. `known`: parts by the rows' indices."""
    if known is None:
        rows = rows.take(rows.column("axis") != STEP_AXIS)
        keys, part = _factorize(*(rows.column(name) for name in Part._fields))
    else:
        keys, part = _present(list(known), rows.column("part"))
    parts = tuple(Part(*key) for key in keys)
    total, exposed = rows.column("total_ns") / 1e9, rows.column("exposed_ns") / 1e9
    compute, host = (np.array([key.axis == axis for key in parts], bool)[part] for axis in (COMPUTE, HOST_AXIS))

    def sums(seconds: Floats) -> Floats:
        """Sum by rank, step and part: a late event has a row of its own."""
        cell = (rows.rank * shape[1] + rows.step) * len(parts) + part
        cells = np.bincount(cell, seconds, shape[0] * shape[1] * len(parts)).astype(np.float32)
        return cells.reshape(*shape, len(parts))

    hidden = np.array([key.name == PAUSE for key in parts], bool)[part]
    own = sums(np.where(compute, total - exposed, np.where(host & ~hidden, exposed, total)))
    wait = sums(np.where(compute | host, 0.0, exposed))
    entered, reduces = np.zeros(shape, np.int64), np.array([key[:2] in REDUCTIONS for key in parts], bool)[part]
    issued = rows.take(reduces)
    np.maximum.at(entered, (issued.rank, issued.step), issued.column("last_issue_ns"))
    sizes = np.bincount(rows.rank * len(parts) + part, rows.column("bytes"), shape[0] * len(parts))
    forwards = [rows.column("count")[part == at] for at, key in enumerate(parts) if key[:2] == (COMPUTE, Kind.F)]
    return {
        "parts": parts, "own": own, "wait": wait, "entered_ns": entered,
        "bytes": sizes.reshape(shape[0], len(parts)) / max(1, shape[1]),
        "forwards": round(sum(float(np.median(count)) for count in forwards)),
    }  # fmt: skip


def _factorize(*columns: npt.NDArray[Any]) -> tuple[list[tuple], Integers]:
    """Return the distinct rows of some columns, and each row's index among them."""
    code, values = np.zeros(len(columns[0]), np.int64), list[list]()
    for column in columns:
        values.append(sorted(set(column.tolist())))
        index = {value: at for at, value in enumerate(values[-1])}
        code = code * len(index) + np.fromiter(map(index.__getitem__, column.tolist()), np.int64, len(column))
    return _present(list(itertools.product(*values)), code)


def _present(rows: list, code: Integers) -> tuple[list, Integers]:
    """Return the `rows` that codes are indices of, and the codes as indices of those."""
    there = np.flatnonzero(np.bincount(code, minlength=len(rows)))
    of_code = np.zeros(len(rows), np.int64)
    of_code[there] = np.arange(len(there))
    return [rows[at] for at in there], of_code[code]
