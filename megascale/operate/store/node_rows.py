"""The rows of a node in an interval: what was drained of its ranks' logs as columns of the store's tables.

A rank's events wait here until their step has ended, so that a step's sums are written once. All arithmetic is on
arrays, which have the fields of their table; texts are indices until columns are made of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megascale.operate.store.schema import STEP_AXIS, TABLES
from megascale.operate.store.table_files import Columns
from megascale.record.events import COMPUTE, HOST_AXIS
from megascale.record.layout import TAGS
from megascale.record.log_reader import Drained, LogReader, event_dtype, step_dtype

if TYPE_CHECKING:
    import pyarrow as pa

_AXIS = 1 << 16  # a key of `RankTotals` is the index of the axis times this number, plus the index of the name
KEYS = ("attempt", "rank", "step", "axis", "name", "chunk", "group_name")  # by which `step_parts` sums events


def row_type(table: str) -> np.dtype:
    """Return the type of a table's rows. Texts are indices."""
    return np.dtype([(column.name, "i4" if column.type == "text" else column.type) for column in TABLES[table]])


def concatenate_rows(parts: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Concatenate arrays of rows of one dtype; np.concatenate would look for a common dtype, field by field."""
    rows, end = np.empty(sum(map(len, parts)), dtype), 0
    for part in parts:
        rows[end : end + len(part)] = part
        end += len(part)
    return rows


class Texts:
    """The texts of a node's rows, each with an index."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {}

    def indices(self, texts: Sequence[str]) -> np.ndarray:
        """Return the indices of texts, which are added where they are new."""
        return np.array([self._indices.setdefault(text, len(self._indices)) for text in texts], np.int32)

    def column(self, indices: np.ndarray) -> pa.DictionaryArray:
        """Return the texts at `indices`."""
        import pyarrow as pa

        return pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(list(self._indices), pa.string()))


@dataclass
class RankTotals:
    """Sums since the rank's start, which never decrease. `train_s`: time of steps, without evaluations and saves;
    `lost`: events that were overwritten before they were read. One thread adds, others may read.
    """

    train_s: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    lost: int = 0
    _seconds: dict[int, tuple[float, float]] = field(default_factory=dict)  # busy and exposed, by axis and name

    def add(self, drained: Drained) -> None:
        """Add new events and steps."""
        events, steps = drained.events, drained.steps
        self.train_s += float(steps["train"].sum())
        self.tokens += int(steps["tokens"].sum())
        self.flops += float(steps["flops"].sum())
        self.lost += drained.lost
        keys, place = np.unique(events["axis"].astype(np.int64) * _AXIS + events["name"], return_inverse=True)
        busy = np.maximum(events["end"] - events["start"] - events["exposed"], 0.0)  # rounded: a bit below 0
        sums = (np.bincount(place, times, len(keys)).tolist() for times in (busy, events["exposed"]))
        for key, *more in zip(keys.tolist(), *sums, strict=True):
            busy_s, exposed_s = self._seconds.get(key, (0.0, 0.0))
            self._seconds[key] = busy_s + more[0], exposed_s + more[1]

    def seconds(self, texts: Sequence[str]) -> tuple[float, dict[str, float], dict[str, float]]:
        """Return the time of compute without the waits in it, in which compute waited for communication by axis, and
        in which training waited for an activity of the host, such as data, by name. `texts`: of the log.
        """
        compute_s, exposed, host = 0.0, dict[str, float](), dict[str, float]()
        for key, (busy_s, exposed_s) in self._seconds.copy().items():
            if max(where := divmod(key, _AXIS)) >= len(texts):
                continue
            axis, name = (texts[at] for at in where)
            if not axis or (axis == HOST_AXIS and not name):
                continue
            if axis == COMPUTE:
                compute_s += busy_s
            elif axis == HOST_AXIS:
                host[name] = host.get(name, 0.0) + exposed_s
            else:
                exposed[axis] = exposed.get(axis, 0.0) + exposed_s
        return compute_s, exposed, host


@dataclass
class RankRows:
    """A rank's log, and what was drained of it and has not been written. `loads`: of experts, by step; `waiting`:
    events of steps that go on; `lost`: events that no step has counted yet; `ended`: the rank writes no more.
    `totals`: of all that was drained.
    """

    log: LogReader
    drained: list[Drained] = field(default_factory=list)
    loads: list[tuple[int, np.ndarray]] = field(default_factory=list)
    waiting: np.ndarray = field(default_factory=lambda: np.empty(0, row_type("events")))
    last_step: int = 0
    lost: int = 0
    ended: bool = False
    totals: RankTotals = field(default_factory=RankTotals)

    @property
    def trains(self) -> bool:
        """True once the rank trains, and its log says which attempt its events belong to."""
        return self.log.state(head_only=True).stored_attempt is not None

    def drain(self) -> None:
        """Take the log's new events."""
        if (loads := self.log.expert_loads()) is not None:
            self.loads.append(loads)
        new = self.log.drain()
        if new.lost or len(new.events) or len(new.steps):
            self.drained.append(new)
            self.totals.add(new)

    def take_loads(self) -> list[np.ndarray]:
        """Return the new rows of `expert_loads`: of layers with experts."""
        attempt, taken, self.loads = self.log.state(head_only=True).stored_attempt or 0, self.loads, []
        found = []
        for step, loads in taken:
            places = np.argwhere(np.broadcast_to(loads.any(1, keepdims=True), loads.shape))
            rows = np.zeros(len(places), row_type("expert_loads"))
            rows["attempt"], rows["step"], (rows["layer"], rows["expert"]) = attempt, step, places.T
            rows["load"] = loads[rows["layer"], rows["expert"]]
            found.append(rows)
        return found

    def take(self, texts: Texts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the new events, the new steps, and the events of steps that have ended."""
        state, drained, self.drained = self.log.state(head_only=True), self.drained, []
        strings = texts.indices(self.log.texts())
        who = {"attempt": state.stored_attempt or 0, "rank": state.rank}
        records = concatenate_rows([part.events for part in drained], event_dtype())
        events = _rows("events", records, who, state.epoch_ns, strings)
        records = concatenate_rows([part.steps for part in drained], step_dtype())
        steps = _rows("steps", records, who, state.epoch_ns, strings)
        tags, inverse = np.unique(records["tags"], return_inverse=True)
        joined = [",".join(tag for bit, tag in enumerate(TAGS) if int(bits) >> bit & 1) for bits in tags]
        steps["tags"] = texts.indices(joined)[inverse]
        first = 0
        for part in drained:  # lost events count in the next step that has ended
            self.lost += part.lost
            if len(part.steps):
                steps["events_lost"][first], self.lost = self.lost, 0
                first += len(part.steps)
        self.last_step = max(self.last_step, int(steps["step"].max(initial=0)))
        waiting = concatenate_rows([self.waiting, events], events.dtype)
        # a step's last communication may end in the next step
        closed = (waiting["step"] < max(1, self.last_step)) | self.ended
        self.waiting = waiting[~closed]
        return events, steps, waiting[closed]


_DURATIONS = ("exposed_ns", "train_ns")


def _rows(table: str, records: np.ndarray, who: Mapping[str, int], epoch_ns: int, strings: np.ndarray) -> np.ndarray:
    """Return a log's events or steps as rows of a table."""
    rows, fields = np.zeros(len(records), row_type(table)), records.dtype.names or ()
    for column in TABLES[table]:
        name = column.name
        if name in who:
            rows[name] = who[name]
        elif name not in fields and (seconds := name.removesuffix("_ns")) in fields:
            ns = np.rint(records[seconds] * 1e9).astype(np.int64)
            rows[name] = ns if name in _DURATIONS else ns + epoch_ns
        elif column.type == "text" and name != "tags":
            rows[name] = strings[np.minimum(records[name], len(strings) - 1)]
        elif name in fields:
            rows[name] = records[name]
    return rows


def step_parts(events: np.ndarray, steps: np.ndarray, texts: Texts) -> np.ndarray:
    """Sum the events of steps by KEYS, and add a row for each step as a whole."""
    order = np.lexsort([events[key] for key in reversed(KEYS)])
    events = events[order]
    new = np.zeros(len(events), bool)
    new[:1] = True
    for key in KEYS:
        new[1:] |= events[key][1:] != events[key][:-1]
    first = np.flatnonzero(new)
    rows = np.zeros(len(first) + len(steps), row_type("step_parts"))
    summed, whole = rows[: len(first)], rows[len(first) :]
    for key in KEYS:
        summed[key] = events[key][first]
    if len(first):
        duration = events["end_ns"] - events["start_ns"]
        again = ~new & (events["axis"] == texts.indices([COMPUTE])[0])  # a segment of the action before it in the rows
        again[1:] &= (events["microbatch"][1:] >= 0) & (events["microbatch"][1:] == events["microbatch"][:-1])
        summed["count"] = np.add.reduceat(~again, first, dtype=np.int32)
        summed["total_ns"] = np.add.reduceat(duration, first)
        summed["max_ns"] = np.maximum.reduceat(duration, first)
        summed["exposed_ns"] = np.add.reduceat(events["exposed_ns"], first)
        summed["bytes"] = np.add.reduceat(events["bytes"], first)
        summed["last_issue_ns"] = np.maximum.reduceat(events["issue_ns"], first)
    for key in ("attempt", "rank", "step"):
        whole[key] = steps[key]
    whole["axis"] = whole["name"] = texts.indices([STEP_AXIS])[0]
    whole["chunk"], whole["count"] = -1, 1
    whole["total_ns"] = whole["max_ns"] = steps["train_ns"]
    whole["last_issue_ns"] = steps["start_ns"]
    return rows


def take_rows(ranks: Sequence[RankRows], texts: Texts) -> dict[str, Columns]:
    """Return the new rows of `events`, `steps`, `step_parts` and `expert_loads`, of ranks of a node that have begun
    to train.
    """
    taken = [rank.take(texts) for rank in ranks]
    events, steps, closed = (concatenate_rows(parts, parts[0].dtype) for parts in zip(*taken, strict=True))
    loads = concatenate_rows([part for rank in ranks for part in rank.take_loads()], row_type("expert_loads"))
    parts = step_parts(closed, steps, texts)
    tables = {"events": events, "steps": steps, "step_parts": parts, "expert_loads": loads}
    return {
        table: {
            column.name: texts.column(rows[column.name]) if column.type == "text" else rows[column.name]
            for column in TABLES[table]
        }
        for table, rows in tables.items()
    }
