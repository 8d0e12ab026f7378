"""The rows of a synthetic job in the tables of an event store, and the store of a run made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megascale.core.storage import Location
from megascale.layout.topology import AXES
from megascale.operate.diagnose.slow.step_cube import StepCube
from megascale.operate.store.schema import TABLES
from megascale.operate.store.table_files import STORE_FOLDER, TableFile, write_rows

if TYPE_CHECKING:
    from lab.fleet import Fleet

EPOCH_NS = 1_700_000_000_000_000_000
"""Start of the job, in ns since 1970."""

FLOPS, PEAK_FLOPS = 1e14, 1e15
"""Model FLOPs of a rank in a step, and FLOP/s of its device."""

MESSAGE_BYTES = 1 << 22

Table = dict[str, npt.NDArray[Any]]
"""Columns by name."""


def tables(fleet: Fleet) -> dict[str, Table]:
    """Return the tables of a job."""
    return {
        "ranks": _ranks(fleet), "steps": _steps(fleet), "step_parts": _step_parts(fleet), "events": _events(fleet),
    }  # fmt: skip


def write_store(fleet: Fleet, run: Path) -> None:
    """Write a job's tables as the event store of a run."""
    for table, columns in fleet.tables.items():
        if len(columns["rank"]):
            write_rows(Location(str(run / STORE_FOLDER)), TableFile(table, "n0", 0, 0, 1), columns)


def cube_of(fleet: Fleet) -> StepCube:
    """Return the cube of a job's tables."""
    return StepCube.from_tables(fleet.tables["step_parts"], fleet.tables["steps"], fleet.tables["ranks"])


def _ranks(fleet: Fleet) -> Table:
    t = fleet.layout.topology
    numbers = np.arange(t.world_size)
    coords = [t.coord(int(rank)) for rank in numbers]
    nodes = np.array([f"n{rank // fleet.layout.node_ranks:04d}" for rank in numbers], object)
    values = {axis: np.array([getattr(coord, axis) for coord in coords], np.int32) for axis in AXES}
    return _table("ranks", len(numbers), values | {"rank": numbers, "world": t.world_size, "node": nodes,
                  "host": nodes, "pid": numbers, "peak_flops": PEAK_FLOPS, "start_ns": EPOCH_NS})  # fmt: skip


def _steps(fleet: Fleet) -> Table:
    s, world = fleet.layout.steps, fleet.layout.topology.world_size
    start = np.repeat(np.rint(fleet.starts * 1e9).astype(np.int64), world) + EPOCH_NS
    train = np.repeat(np.rint(fleet.seconds * 1e9).astype(np.int64), world)
    gc = fleet.times.gc.reshape(s, -1)[:, np.argsort(fleet.rank.reshape(-1))].reshape(-1) * fleet.gc_recorded > 0
    tags = np.where(gc, "gc", "").astype(object)
    tags[:world] = np.where(gc[:world], "first step,gc", "first step")
    work = np.repeat(fleet.work, world)
    return _table("steps", s * world, {
        "rank": np.tile(np.arange(world), s), "step": np.repeat(np.arange(1, s + 1), world), "start_ns": start,
        "end_ns": start + train, "train_ns": train, "tags": tags, "loss": 2.0, "grad_norm": 1.0,
        "tokens": np.rint(1e6 * work).astype(np.int64), "flops": FLOPS * work * world,
    })  # fmt: skip


def _step_parts(fleet: Fleet) -> Table:
    s = fleet.layout.steps
    step = np.broadcast_to(np.arange(1, s + 1)[:, None, None, None], fleet.shape)
    rank = np.broadcast_to(fleet.rank, fleet.shape)
    issue = np.rint((fleet.entered + fleet.starts[:, None, None, None]) * 1e9).astype(np.int64) + EPOCH_NS
    columns: dict[str, list[npt.NDArray[Any]]] = {column.name: [] for column in TABLES["step_parts"]}
    for (axis, name, chunk), sums in fleet.parts.items():
        there = sums.count > 0
        size = int(there.sum())
        row: Mapping[str, object] = {
            "attempt": 0, "rank": rank[there], "step": step[there], "axis": axis, "name": name, "chunk": chunk,
            "count": sums.count[there], "total_ns": np.rint(sums.total[there] * 1e9),
            "max_ns": np.rint(sums.longest[there] * 1e9), "exposed_ns": np.rint(sums.exposed[there] * 1e9),
            "bytes": sums.size[there],
            "last_issue_ns": issue[there] if (axis, name) == ("dp", "reduce_scatter") else 0,
        }  # fmt: skip
        for column, value in _table("step_parts", size, row).items():
            columns[column].append(value)
    return {column: np.concatenate(values) for column, values in columns.items()}


def _events(fleet: Fleet) -> Table:
    """Return both ends of every message of the newest steps."""
    columns: dict[str, list[npt.NDArray[Any]]] = {column.name: [] for column in TABLES["events"]}
    newest = np.arange(fleet.layout.steps)[-fleet.events :] if fleet.events else np.arange(0)
    offset = fleet.starts[newest][:, None, None]
    for one in fleet.messages:
        sent, arrived = (np.rint((time + offset) * 1e9).astype(np.int64).reshape(-1) + EPOCH_NS
                         for time in (one.sent, one.arrived))  # fmt: skip
        here, there = (np.tile(fleet.rank[stage].reshape(-1), len(newest)) for stage in (one.source, one.target))
        shared: dict[str, object] = {
            "step": np.repeat(newest + 1, here.size // len(newest)), "axis": "pp", "layer": -1,
            "stage": one.virtual_stage, "direction": "forward" if one.forward else "backward", "chunk": -1,
            "microbatch": one.microbatch, "group_name": "pp", "bytes": MESSAGE_BYTES, "end_ns": arrived,
        }  # fmt: skip
        for name, rank, peer, issue in (("send", here, there, sent), ("receive", there, here, sent - 1000)):
            row = shared | {"name": name, "rank": rank, "peer": peer, "issue_ns": issue, "start_ns": issue}
            for column, value in _table("events", here.size, row).items():
                columns[column].append(value)
    return {column: np.concatenate(values) if values else np.zeros(0) for column, values in columns.items()}


def _table(name: str, rows: int, values: Mapping[str, object]) -> Table:
    """Return the columns of a table; those without values are 0, or empty texts."""
    table = {}
    for column in TABLES[name]:
        text = column.type == "text"
        value = np.asarray(values.get(column.name, "" if text else 0))
        table[column.name] = np.broadcast_to(value, (rows,)).astype(object if text else np.dtype(column.type))
    return table
