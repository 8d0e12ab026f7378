"""The times of a run's steps as an array, rank x step x part, from the tables of the event store.

`StepCube.from_tables` reads `step_parts`, `steps` and `ranks` (`store.schema`); all other analyses read the cube.
An action's own time is its duration without the waits inside it: a rank that computes longer differs in its own time
from a rank that waits for it. A step that several attempts have run counts in the last attempt. Steps from before a
rank moved, to another node or place in the layout, are left out: they were other machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megascale.layout.topology import AXES
from megascale.operate.store.schema import COLD_TAGS, COMMON
from megascale.record.events import COMPUTE, HOST_AXIS, PAUSE
from megascale.schedule.ir import Kind

if TYPE_CHECKING:
    import pyarrow as pa

Floats = npt.NDArray[Any]
Integers = npt.NDArray[Any]
Booleans = npt.NDArray[Any]
Columns = Mapping[str, npt.NDArray[Any]]
"""A table's columns by name: arrays, of text also dictionary arrays of pyarrow, with the codes of the store's files."""

OTHER = "other"  # name of the host's part of a step outside of all recorded actions, waits and activities

CLASS_TAGS = frozenset({"gc", "evaluation", "checkpoint"})
"""Tags of steps that a known cause has made longer: these are not compared with the others, unless they are common."""

REDUCTIONS = frozenset((axis, name) for axis in ("dp", "edp") for name in ("reduce_scatter", "all_reduce"))
"""Axis and name of the collectives that reduce gradients."""


def dictionary(column: npt.NDArray[Any] | pa.DictionaryArray) -> tuple[list[Any], Integers]:
    """Return the distinct values of a column in the order in which they come, and each row's index among them."""
    import pyarrow as pa

    coded = column if isinstance(column, pa.DictionaryArray) else pa.array(column).dictionary_encode()
    return coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False)


class Part(NamedTuple):
    """A part of a step: an action, the communication of a group by operation, or an activity of the host."""

    axis: str
    name: str
    chunk: int = -1
    group_name: str = ""

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
        coords = {axis: np.asarray(ranks[axis])[last] for axis in (*AXES, "ep", "dp_shard") if axis in ranks}
        crowded = list[tuple[str, int, int]]()
        if "cores" in ranks:  # agents on one host count its cores alike; 0: not known
            names = np.asarray(ranks["host"])[last].astype(str)
            hosts, host, count = np.unique(names, return_inverse=True, return_counts=True)
            cores = np.zeros(len(hosts), int)
            np.maximum.at(cores, host, np.ma.filled(ranks["cores"][last], 0))
            few = np.flatnonzero((cores > 0) & (cores < count))
            crowded = [(str(hosts[at]), int(count[at]), int(cores[at])) for at in few]
        return cls(np.asarray(ranks["rank"])[last], node, tuple(map(str, nodes)), coords, tuple(crowded))

    def index(self, ranks: Integers) -> Integers:
        """Return the positions of `ranks`; -1 for unknown ranks."""
        position = np.searchsorted(self.rank, ranks).clip(max=max(0, len(self.rank) - 1))
        return np.where(self.rank[position] == ranks, position, -1) if len(self.rank) else position - 1

    def codes(self, *axes: str | Integers) -> Integers:
        """Return a code for each rank, equal for ranks with equal coordinates on `axes`, or equal given numbers."""
        code = np.zeros(len(self.rank), np.int64)
        for axis in axes:
            place = self.coords[axis] if isinstance(axis, str) else axis
            code = code * (int(place.max(initial=0)) + 1) + place
        return code

    def group_codes(self, group: str) -> Integers:
        """Return a code for each rank, equal for the ranks of a communication group. `group`: by its axis; with
        ".shard" the neighbours along it that shard, with ".replicate" the ranks with copies of their shards.
        """
        (axis, _, part), dp = group.partition("."), self.coords["dp"]
        inner, ep = self.coords.get("dp_shard", dp), self.coords.get("ep", np.zeros(len(self.rank), np.int64))
        edp = self.codes("dp", "cp", "tp") // (int(ep.max(initial=0)) + 1)
        others: Mapping[str, list[str | Integers]] = {
            **{axis: [other for other in AXES if other != axis] for axis in AXES},
            "dp": ["tp", "pp"], "ep": ["pp", edp], "edp": ["pp", ep],
            "shard": [dp // (int(inner.max(initial=0)) + 1)], "replicate": ["cp", inner],
        }  # fmt: skip
        return self.codes(*others.get(axis, []), *others.get(part, []))


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
    def from_tables(cls, step_parts: Columns, steps: Columns, ranks: Columns) -> StepCube:
        """Build the cube of the steps in the table `steps` since `first_alike`."""
        places, numbers = Places.from_table(ranks), np.unique(np.asarray(steps["step"]))
        attempts = np.full(len(numbers), -1)
        np.maximum.at(attempts, np.searchsorted(numbers, steps["step"]), np.asarray(steps["attempt"]))
        alike = attempts >= first_alike(ranks)
        numbers, attempts = numbers[alike], attempts[alike]
        of_steps, of_parts = (_Rows.of_table(table, places, numbers, attempts) for table in (steps, step_parts))
        shape = len(places.rank), len(numbers)
        return cls(places, numbers, **_step_arrays(of_steps, shape), **_part_arrays(of_parts, shape))

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
    rank: Integers
    step: Integers

    @classmethod
    def of_table(cls, table: Columns, places: Places, steps: Integers, attempts: Integers) -> _Rows:
        (ranks, rank), (numbers, step) = dictionary(table["rank"]), dictionary(table["step"])
        position = np.searchsorted(steps, numbers)
        known = np.append(steps, -1)[position] == numbers
        rank = places.index(np.array(ranks, int)).astype(np.int32)[rank]
        step = np.where(known, position, -1).astype(np.int32)[step]
        last = np.append(attempts, -1)[step] == table["attempt"]
        return cls(table, rank, step).take((rank >= 0) & (step >= 0) & last)

    def column(self, name: str) -> npt.NDArray[Any]:
        return np.asarray(self.table[name])

    def take(self, chosen: Booleans) -> _Rows:
        if chosen.all():
            return self
        at = np.flatnonzero(chosen)
        table = {
            name: column[at] if isinstance(column, np.ndarray) else column.take(at)
            for name, column in self.table.items()
        }
        return _Rows(table, self.rank[at], self.step[at])

    def parts(self) -> tuple[tuple[Part, ...], Integers]:
        """Return the parts of these rows in ascending order, and each row's index among them."""
        columns, code = [dictionary(self.table[name]) for name in Part._fields], np.zeros(len(self.rank), np.int32)
        for values, index in columns:
            code = code * len(values) + index
        there = np.flatnonzero(np.bincount(code))
        indices = np.unravel_index(there, [max(1, len(values)) for values, _ in columns])
        named = [Part(*(values[at] for (values, _), at in zip(columns, each, strict=True)))
                 for each in zip(*indices, strict=True)]  # fmt: skip
        order = sorted(range(len(named)), key=named.__getitem__)
        number = np.zeros(int(there.max(initial=-1)) + 1, np.int32)
        number[there[order]] = np.arange(len(order))
        return tuple(named[at] for at in order), number[code]


def _step_arrays(rows: _Rows, shape: tuple[int, int]) -> dict[str, Any]:
    """Return the fields of a cube that the table `steps` has."""
    wall, ordinary, warm = np.zeros(shape, np.float32), np.zeros(shape, bool), np.ones(shape[1], bool)
    tokens, flops = np.zeros(shape[1]), np.zeros(shape[1])
    wall[rows.rank, rows.step] = rows.column("train_ns") / 1e9
    tokens[rows.step], flops[rows.step] = rows.column("tokens"), rows.column("flops")
    tags, code = dictionary(rows.table["tags"])
    named = [frozenset(tag.split(",")) for tag in tags]
    cold = np.array([not names.isdisjoint(COLD_TAGS) for names in named], bool)[code]
    warm[rows.step[cold]] = False
    counts = np.bincount(code[warm[rows.step]], minlength=len(named))
    rare = {tag for tag in CLASS_TAGS if counts[[tag in names for names in named]].sum() < COMMON * counts.sum()}
    like = np.array([rare.isdisjoint(names) for names in named], bool)[code]
    ordinary[rows.rank, rows.step] = like & warm[rows.step]
    return {"wall": wall, "ordinary": ordinary, "warm": warm, "tokens": tokens, "flops": flops}


def _part_arrays(rows: _Rows, shape: tuple[int, int]) -> dict[str, Any]:
    """Return the fields of a cube that the table `step_parts` has."""
    parts, part = rows.parts()
    total, exposed = rows.column("total_ns") / 1e9, rows.column("exposed_ns") / 1e9
    compute, host = (np.array([key.axis == axis for key in parts], bool)[part] for axis in (COMPUTE, HOST_AXIS))
    hidden = np.array([key.name == PAUSE for key in parts], bool)[part]
    cell = (rows.rank * np.int64(shape[1]) + rows.step) * len(parts) + part

    def sums(seconds: Floats) -> Floats:
        """Sum by rank, step and part: a late event has a row of its own."""
        cells = np.bincount(cell, seconds, shape[0] * shape[1] * len(parts)).astype(np.float32)
        return cells.reshape(*shape, len(parts))

    own_s = np.where(host & ~hidden, exposed, total)
    own = sums(np.subtract(total, exposed, out=own_s, where=compute))
    exposed[compute | host] = 0.0
    wait = sums(exposed)
    entered, reduces = np.zeros(shape, np.int64), np.array([key[:2] in REDUCTIONS for key in parts], bool)[part]
    np.maximum.at(entered, (rows.rank[reduces], rows.step[reduces]), rows.column("last_issue_ns")[reduces])
    sizes = np.bincount(rows.rank * len(parts) + part, rows.column("bytes"), shape[0] * len(parts))
    forwards = [rows.column("count")[part == at] for at, key in enumerate(parts) if key[:2] == (COMPUTE, Kind.F)]
    return {
        "parts": parts, "own": own, "wait": wait, "entered_ns": entered,
        "bytes": sizes.reshape(shape[0], len(parts)) / max(1, shape[1]),
        "forwards": round(sum(float(np.median(count)) for count in forwards)),
    }  # fmt: skip
