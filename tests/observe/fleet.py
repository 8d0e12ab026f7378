"""The event store's tables of a synthetic job: a pipeline schedule whose ranks wait for each other, with faults.

Every step runs the compute schedule of all stages on vectors over steps and replicas: a rank of a tensor-parallel group
waits for the slowest, a stage for its messages, a replica for the others' reductions, and everybody for the totals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megascale.core.storage import Location
from megascale.eventstore.schema import TABLES
from megascale.eventstore.table_files import STORE_FOLDER, TableFile, write_rows
from megascale.layout.topology import AXES, Topology
from megascale.observe.step_cube import StepCube
from megascale.schedule.interleaved import interleaved_1f1b
from megascale.schedule.ir import Kind, build_schedule
from megascale.schedule.one_f_one_b import one_f_one_b

EPOCH_NS = 1_700_000_000_000_000_000
FORWARD_S, BACKWARD_S = 0.010, 0.020
HEAD, EMBEDDING = 0.3, 0.1
"""Extra work of the last and the first stage, as a share of a chunk's."""
MESSAGE_S, TP_S, REDUCE_S, GATHER_S = 0.0004, 0.0006, 0.012, 0.002
UPDATE_S, NORM_S, DATA_S = 0.004, 0.002, 0.001
FLOPS, PEAK_FLOPS = 1e14, 1e15
DTYPES = {"text": object, "float64": np.float64}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Layout:
    """Axes of a job, chunks a rank, micro-batches, ranks of a node, steps."""

    topology: Topology
    chunks: int = 1
    microbatches: int = 8
    node_ranks: int = 8
    steps: int = 60


@dataclass(frozen=True)
class Fault:
    """An injected fault. `rank` or `node`: the culprit; `peer`: the other node of a link. `factor`: slowdown of compute
    or of messages; `share`: seconds of data or gc, in forwards; `every`: mean steps between two. From step `since` on.
    """

    kind: str = ""
    rank: int = -1
    node: int = -1
    peer: int = -1
    factor: float = 1.0
    share: float = 0.0
    every: int = 1
    since: int = 0


@dataclass(frozen=True)
class Times:
    """Own times of all ranks, [S, pp, dp, tp] in seconds, beside a chunk's forward and backward [.., chunk]."""

    forward: Floats
    backward: Floats
    data: Floats
    gc: Floats
    update: Floats
    norm: Floats


class Fleet:
    """A job. `tables` has the columns of the event store."""

    def __init__(
        self, layout: Layout, seed: int = 0, fault: Fault = Fault(), *, noise: float = 0.02, events: int = 3,
        work: Floats | None = None, decay: float = 0.0, gc_recorded: bool = True,
    ) -> None:  # fmt: skip
        """`noise`: of a rank and step. `events`: newest steps with messages. `work` [S]: work of a step relative to 1.
        `decay`: standard deviation of a rank's pauses in the last step, in forwards. `gc_recorded`: False for pauses
        of an unknown cause.
        """
        t = layout.topology
        self.layout, self.fault, self.draw = layout, fault, np.random.default_rng(seed)
        self.shape = layout.steps, t.pp, t.dp * t.cp, t.tp
        self.rank = np.array(
            [[[t.rank(t.coord(0)._replace(tp=x, cp=d % t.cp, dp=d // t.cp, pp=p)) for x in range(t.tp)]
              for d in range(t.dp * t.cp)] for p in range(t.pp)]
        )  # fmt: skip
        self.node = self.rank // layout.node_ranks
        self.gc_recorded = gc_recorded
        self.work = np.ones(layout.steps) if work is None else work
        self.times = self._own_times(noise, decay)
        self.messages: list[tuple[int, int, int, int, bool, Floats, Floats]] = []
        self.parts: dict[tuple[str, str, int], dict[str, Floats]] = {}
        self._run()
        self.tables: dict[str, dict[str, npt.NDArray]] = {
            "ranks": self._ranks(), "steps": self._steps(), "step_parts": self._step_parts(),
            "events": self._events(events),
        }  # fmt: skip

    def _own_times(self, noise: float, decay: float) -> Times:
        s, p, d, x = self.shape
        chunks = self.layout.chunks
        speed = 1 + noise * self.draw.standard_normal((s, p, d, x)).clip(-3, 3)
        speed *= self._culprit_factor("slow") * self.work[:, None, None, None]
        if self.fault.kind == "job":
            speed[self.fault.since :] *= self.fault.factor
        stage = np.ones((p, chunks))
        stage[0, 0] += EMBEDDING
        stage[-1, -1] += HEAD
        passes = speed[..., None] * stage[:, None, None, :]
        data = DATA_S * self.draw.uniform(0.8, 1.2, self.shape)
        data *= np.isin(np.arange(p), (0, p - 1))[:, None, None]
        gc = np.zeros(self.shape)
        for kind, values in (("data", data), ("gc", gc)):
            if self.fault.kind == kind:
                hits = self.draw.random(self.shape) < 1 / self.fault.every
                hits[: self.fault.since] = False
                values += (
                    hits * self._culprits() * self.fault.share * FORWARD_S * self.draw.uniform(0.7, 1.3, self.shape)
                )
        late = decay * FORWARD_S * np.linspace(0, 1, s)[:, None, None, None]
        gc += np.abs(late * self.draw.standard_normal(self.shape))
        update = UPDATE_S * speed
        return Times(FORWARD_S * passes, BACKWARD_S * passes, data, gc, update, NORM_S * speed)

    def _culprits(self) -> npt.NDArray[np.bool_]:
        """The ranks of the fault, [pp, dp, tp]; all for a fault without a culprit."""
        if self.fault.node >= 0:
            return self.node == self.fault.node
        return self.rank == self.fault.rank if self.fault.rank >= 0 else np.ones_like(self.rank, bool)

    def _culprit_factor(self, kind: str) -> Floats:
        factor = np.ones(self.shape)
        if self.fault.kind == kind:
            factor[self.fault.since :] += (self.fault.factor - 1) * self._culprits()
        return factor

    def _run(self) -> None:
        """Run the schedule on vectors [S, dp], with times from the start of each step."""
        p = self.shape[1]
        chunks, m, times = self.layout.chunks, self.layout.microbatches, self.times
        orders = build_schedule(one_f_one_b if chunks == 1 else interleaved_1f1b, p, chunks, m)
        ready: dict[tuple[Kind, int, int], Floats] = {}
        host = times.data.copy()
        clock = [host[:, stage] for stage in range(p)]  # [S, dp, tp]
        last, at = p * chunks - 1, [0] * p
        while any(at[stage] < len(orders[stage]) for stage in range(p)):
            for stage in range(p):
                while at[stage] < len(orders[stage]):
                    kind, chunk, microbatch = orders[stage][at[stage]]
                    virtual = chunk * p + stage
                    key = (kind, virtual, microbatch)
                    first = virtual == (0 if kind is Kind.F else last)
                    if not first and key not in ready:
                        break
                    clock[stage] = self._act(stage, chunk, kind, microbatch, clock[stage], ready.pop(key, None))
                    if virtual != (last if kind is Kind.F else 0):
                        target = virtual + (1 if kind is Kind.F else -1)
                        arrival = self._send(stage, target % p, kind, microbatch, target, clock[stage])
                        ready[kind, target, microbatch] = arrival
                    at[stage] += 1
        ends = np.stack(clock, 1)
        self._finish(ends)

    def _act(
        self, stage: int, chunk: int, kind: Kind, microbatch: int, now: Floats, arrival: Floats | None
    ) -> Floats:  # fmt: skip
        """Run an action of a stage's ranks at `now` [S, dp, tp], and return when it ends."""
        own = (self.times.forward if kind is Kind.F else self.times.backward)[:, stage, :, :, chunk]
        if kind is Kind.F and microbatch == self.layout.microbatches // 2 and chunk == 0:
            now = now + self.times.gc[:, stage]
        start = now if arrival is None else np.maximum(now, arrival)
        done = start + own
        tp = TP_S if self.shape[3] > 1 else 0.0
        end = done.max(2, keepdims=True) + tp + 0 * done
        self._add(("compute", str(kind), chunk), stage, total=end - now, exposed=end - now - own, count=1)
        if self.shape[3] > 1:
            self._add(("tp", "all_reduce", chunk), stage, total=end - done, exposed=end - done, count=4, size=1 << 22)
        if arrival is not None:
            self._add(("pp", "receive", chunk), stage, total=start - now, exposed=start - now, count=1, size=1 << 22)
        return end

    def _send(self, stage: int, target: int, kind: Kind, microbatch: int, virtual: int, now: Floats) -> Floats:
        """Send to the next stage, and return the arrivals [S, dp, tp]."""
        arrival = now + MESSAGE_S * self.draw.uniform(0.95, 1.1, now.shape)
        if self.fault.kind == "link":
            ends = self.node[stage], self.node[target]
            there = (ends[0] == self.fault.node) & ((ends[1] == self.fault.peer) | (self.fault.peer < 0))
            if self.fault.peer < 0:
                there |= ends[1] == self.fault.node
            slow = np.zeros(now.shape)
            slow[self.fault.since :] = there * MESSAGE_S * (self.fault.factor - 1)
            arrival = arrival + slow
        self._add(("pp", "send", -1), stage, total=arrival - now, exposed=0 * now, count=1, size=1 << 22)
        self.messages.append((stage, target, virtual, microbatch, kind is Kind.F, now, arrival))
        return arrival

    def _finish(self, ends: Floats) -> None:
        """Reduce the gradients over dp, sum the totals, update and all-gather; `ends` [S, pp, dp, tp]."""
        times, d = self.times, self.shape[2]
        jitter = self.draw.uniform(0, 1e-4, self.shape)
        self.entered = ends + jitter
        slow = np.ones(self.shape)
        if self.fault.kind == "dp_group":
            slow[self.fault.since :] += (self.fault.factor - 1) * (self.rank % self.shape[3] == self.fault.rank)
        reduced = self.entered.max(2, keepdims=True) + (REDUCE_S * slow if d > 1 else 0.0)
        totals = (reduced + times.norm).max((1, 2, 3), keepdims=True) + 2e-4
        updated = totals + times.update
        end = updated.max((1, 2, 3), keepdims=True) + GATHER_S
        wait = reduced - self.entered
        for stage in range(self.shape[1]):
            norm, update = times.norm[:, stage], times.update[:, stage]
            self._add(("compute", "grad_norm", -1), stage, total=wait[:, stage] + norm, exposed=wait[:, stage], count=1)
            if d > 1:
                self._add(("dp", "reduce_scatter", 0), stage, total=wait[:, stage], exposed=wait[:, stage], count=1,
                          size=1 << 28)  # fmt: skip
            left = (totals - reduced - times.norm)[:, stage]
            self._add(("world", "all_reduce", -1), stage, total=left, exposed=left, count=1, size=64)
            self._add(("compute", "update", 0), stage, total=update, exposed=0 * update, count=1)
            left = (end - updated)[:, stage]
            if d > 1:
                self._add(("dp", "all_gather", 0), stage, total=left, exposed=left, count=1, size=1 << 27)
            self._add(("host", "data", -1), stage, total=times.data[:, stage], exposed=times.data[:, stage], count=1)
            if times.gc.any() and self.gc_recorded:
                self._add(("host", "gc", -1), stage, total=times.gc[:, stage], exposed=times.gc[:, stage], count=1)
        self.seconds = end[:, 0, 0, 0]

    def _add(
        self, part: tuple[str, str, int], stage: int, *, total: Floats, exposed: Floats, count: int, size: int = 0
    ) -> None:
        zero = {name: np.zeros(self.shape) for name in ("total", "max", "exposed", "count", "bytes")}
        sums = self.parts.setdefault(part, zero)
        sums["total"][:, stage] += total
        sums["exposed"][:, stage] += exposed
        np.maximum(sums["max"][:, stage], total, out=sums["max"][:, stage])
        sums["count"][:, stage] += count
        sums["bytes"][:, stage] += size

    @property
    def starts(self) -> Floats:
        """The starts of the steps, in seconds after the first."""
        return np.concatenate([[0.0], np.cumsum(self.seconds)[:-1]])

    def _ranks(self) -> dict[str, npt.NDArray]:
        t = self.layout.topology
        numbers = np.arange(t.world_size)
        coords = [t.coord(int(rank)) for rank in numbers]
        nodes = np.array([f"n{rank // self.layout.node_ranks:04d}" for rank in numbers], object)
        values = {axis: np.array([getattr(coord, axis) for coord in coords], np.int32) for axis in AXES}
        return _table("ranks", len(numbers), values | {"rank": numbers, "world": t.world_size, "node": nodes,
                      "host": nodes, "pid": numbers, "peak_flops": PEAK_FLOPS, "start_ns": EPOCH_NS})  # fmt: skip

    def _steps(self) -> dict[str, npt.NDArray]:
        s, world = self.layout.steps, self.layout.topology.world_size
        start = np.repeat(np.rint(self.starts * 1e9).astype(np.int64), world) + EPOCH_NS
        train = np.repeat(np.rint(self.seconds * 1e9).astype(np.int64), world)
        gc = self.times.gc.reshape(s, -1)[:, np.argsort(self.rank.reshape(-1))].reshape(-1) * self.gc_recorded > 0
        tags = np.where(gc, "gc", "").astype(object)
        tags[:world] = np.where(gc[:world], "first step,gc", "first step")
        work = np.repeat(self.work, world)
        return _table("steps", s * world, {
            "rank": np.tile(np.arange(world), s), "step": np.repeat(np.arange(1, s + 1), world), "start_ns": start,
            "end_ns": start + train, "train_ns": train, "tags": tags, "loss": 2.0, "grad_norm": 1.0,
            "tokens": np.rint(1e6 * work).astype(np.int64), "flops": FLOPS * work * world,
        })  # fmt: skip

    def _step_parts(self) -> dict[str, npt.NDArray]:
        s = self.layout.steps
        step = np.broadcast_to(np.arange(1, s + 1)[:, None, None, None], self.shape)
        rank = np.broadcast_to(self.rank, self.shape)
        issue = np.rint((self.entered + self.starts[:, None, None, None]) * 1e9).astype(np.int64) + EPOCH_NS
        columns: dict[str, list[npt.NDArray]] = {column.name: [] for column in TABLES["step_parts"]}
        for (axis, name, chunk), sums in self.parts.items():
            there = sums["count"] > 0
            size = int(there.sum())
            row: Mapping[str, object] = {
                "attempt": 0, "rank": rank[there], "step": step[there], "axis": axis, "name": name, "chunk": chunk,
                "count": sums["count"][there], "total_ns": np.rint(sums["total"][there] * 1e9),
                "max_ns": np.rint(sums["max"][there] * 1e9), "exposed_ns": np.rint(sums["exposed"][there] * 1e9),
                "bytes": sums["bytes"][there],
                "last_issue_ns": issue[there] if (axis, name) == ("dp", "reduce_scatter") else 0,
            }  # fmt: skip
            for column, value in _table("step_parts", size, row).items():
                columns[column].append(value)
        return {column: np.concatenate(values) for column, values in columns.items()}

    def _events(self, steps: int) -> dict[str, npt.NDArray]:
        """Both ends of every message of the newest steps."""
        columns: dict[str, list[npt.NDArray]] = {column.name: [] for column in TABLES["events"]}
        newest = np.arange(self.layout.steps)[-steps:] if steps else np.arange(0)
        offset = self.starts[newest][:, None, None]
        for stage, target, virtual, microbatch, forward, sent, arrived in self.messages:
            ends = [np.rint((time[newest] + offset) * 1e9).astype(np.int64).reshape(-1) + EPOCH_NS
                    for time in (sent, arrived)]  # fmt: skip
            here, there = (np.tile(self.rank[each].reshape(-1), len(newest)) for each in (stage, target))
            shared: dict[str, object] = {
                "step": np.repeat(newest + 1, here.size // max(1, len(newest))), "axis": "pp", "part": "",
                "layer": -1, "stage": virtual, "direction": "forward" if forward else "backward", "chunk": -1,
                "microbatch": microbatch, "group_name": "pp", "sequence": 0, "bytes": 1 << 22,
            }  # fmt: skip
            for name, rank, peer, issue in (("send", here, there, ends[0]), ("receive", there, here, ends[0] - 1000)):
                row = shared | {"name": name, "rank": rank, "peer": peer, "issue_ns": issue, "start_ns": issue,
                                "end_ns": ends[1], "exposed_ns": 0}  # fmt: skip
                for column, value in _table("events", here.size, row).items():
                    columns[column].append(value)
        return {column: np.concatenate(values) if values else np.zeros(0) for column, values in columns.items()}


def _table(name: str, rows: int, values: Mapping[str, object]) -> dict[str, npt.NDArray]:
    """The columns of a table; those without values are 0."""
    return {
        column.name: np.broadcast_to(
            np.asarray(values.get(column.name, "" if column.type == "text" else 0)), (rows,)
        ).astype(DTYPES.get(column.type, np.dtype(column.type) if column.type != "text" else object))
        for column in TABLES[name]
    }


def write_store(fleet: Fleet, run: Path) -> None:
    """Write a fleet's tables as the event store of a run."""
    for table, columns in fleet.tables.items():
        if len(columns["rank"]):
            write_rows(Location(str(run / STORE_FOLDER)), TableFile(table, "n0", 0, 0, 1), columns)


def cube_of(fleet: Fleet) -> StepCube:
    """The cube of a fleet's tables."""
    return StepCube.from_tables(fleet.tables["step_parts"], fleet.tables["steps"], fleet.tables["ranks"])
