"""The collector of a node: drains the logs of its ranks, and writes their rows into the run's event store.

- `Collector`: one step of it at a time
- `CollectorThread`: the steps, in a thread

Ranks never wait for a collector. Whatever happens to the store, such as a full or dead disk, is said once, and the rows
of a few intervals wait in memory.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.core.errors import MegascaleError
from megascale.core.outages import Outages
from megascale.core.process import process_exists, usable_cores
from megascale.operate.store.node_store import NodeStore
from megascale.operate.store.rank_spread import RankSpread
from megascale.operate.store.schema import TABLES
from megascale.operate.store.settings import StoreSettings
from megascale.operate.store.table_files import Columns
from megascale.record.log_reader import LogReader
from megascale.record.rank_state import LogError, RankState

if TYPE_CHECKING:  # numpy takes a while, and threads
    from megascale.operate.store.node_rows import RankRows, Texts

POLL_S = 0.5  # seconds between drains of the logs
DRAIN_S, FINISH_S = 2.0, 10.0  # until all is read, and written, after the ranks' end; only a dead disk takes longer
MAX_INTERVALS_WAITING = 12  # intervals whose rows wait for a store that cannot be written; then the oldest are dropped

Say = Callable[[str], None]


class Collector:
    """Collects from ranks with logs in `paths` (by rank, which may grow). `say`: for messages."""

    def __init__(self, paths: Mapping[int, Path], say: Say) -> None:
        self._paths = paths
        self._say = say
        self._logs: dict[int, LogReader] = {}
        self._ranks: dict[int, RankRows] = {}  # of logs whose events are stored
        self._states: dict[int, RankState] = {}
        self._known: set[int] = set()  # ranks in the table `ranks`
        self._texts: Texts | None = None
        self._host_metrics: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=1000)
        self._settings: StoreSettings | None = None
        self._store: NodeStore | None = None
        self._stored_attempt = -1
        self._spread: RankSpread | None = None
        self._waiting: deque[tuple[int, int, dict[str, Columns]]] = deque()
        self._last_ms = time.time_ns() // 1_000_000
        self._outages = Outages()

    @property
    def interval_s(self) -> float:
        """Seconds between writes."""
        return self._settings.interval_s if self._settings else StoreSettings.interval_s

    @property
    def ranks(self) -> dict[int, RankRows]:
        """The ranks whose events are stored, as far as they have begun to train; for any thread."""
        return {rank: rows for rank, rows in self._ranks.copy().items() if rows.trains}

    def live_states(self) -> dict[int, RankState]:
        """Return the states of the ranks whose processes run; for any thread."""
        return {rank: log.state() for rank, log in self._logs.copy().items() if process_exists(log.pid)}

    def add_host_metrics(self, metrics: Mapping[str, float]) -> None:
        """Take a sample of the host's metrics."""
        self._host_metrics.append((time.time_ns(), metrics))

    def poll(self) -> None:
        """Find new logs, and drain all."""
        for rank, path in dict(self._paths).items():
            if rank not in self._logs:
                with contextlib.suppress(OSError, LogError):
                    self._logs[rank] = log = LogReader(path)
                    if log.note:
                        from megascale.operate.store.node_rows import RankRows, Texts

                        self._texts = self._texts or Texts()
                        self._settings = self._settings or StoreSettings(**log.note)
                        self._ranks[rank] = RankRows(log)
        for rows in self._ranks.values():
            rows.ended = not process_exists(rows.log.pid)  # before the drain: nothing comes after
            rows.drain()

    def write(self) -> None:
        """Write what was drained and the states that were read. Says once that the store cannot be written."""
        settings = self._settings
        if settings is None or self._texts is None:
            return
        if ready := self.ranks:
            from megascale.operate.store.node_rows import take_rows

            tables = take_rows(list(ready.values()), self._texts)
            tables["host_metrics"] = _columns("host_metrics", self._host_rows(settings.node))
            if not settings.events_h:
                del tables["events"]
            self._queue(tables)
        try:
            self._store_rows(ready, settings)
        except OSError as error:
            if self._outages.begins("store"):
                what = f"the event store {settings.url} cannot be written: {error.strerror or error}"
                self._say(f"WARNING: {what}; tried again every {self.interval_s:g} s")
            return
        self._outages.ends("store")
        if missing := self._outages.ends("dropped"):
            self._say(f"the event store is written again; the rows of {missing} intervals are missing")
        if 0 in ready and settings.tensorboard:
            self._write_spread(settings, last=ready[0].ended)

    def missing(self) -> int:
        """Return the intervals whose rows have not reached the store, dropped or waiting; dropped ones count once."""
        return self._outages.ends("dropped") + len(self._waiting)

    def _write_spread(self, settings: StoreSettings, *, last: bool) -> None:
        """Write how ranks differ, into TensorBoard; says once that this fails."""
        self._spread = self._spread or RankSpread(settings, self._stored_attempt)
        try:
            self._spread.write_if_due(last=last)
        except OSError as error:
            if self._outages.begins("spread"):
                self._say(f"WARNING: TensorBoard misses how ranks differ: {error.strerror or error}; tried again")
            return
        self._outages.ends("spread")

    def _queue(self, tables: dict[str, Columns]) -> None:
        start_ms, self._last_ms = self._last_ms, max(self._last_ms + 1, time.time_ns() // 1_000_000)
        filled = {table: columns for table, columns in tables.items() if len(next(iter(columns.values())))}
        self._waiting.append((start_ms, self._last_ms, filled))
        if len(self._waiting) > MAX_INTERVALS_WAITING:
            self._waiting.popleft()
            self._outages.begins("dropped")

    def _store_rows(self, ready: Mapping[int, RankRows], settings: StoreSettings) -> None:
        store = self._open_store(ready, settings)
        if ready.keys() - self._known:  # before their steps: readers know the ranks of all rows
            states = [rows.log.state(head_only=True) for rows in ready.values()]
            cores = usable_cores(state.pid for state in states)
            rows: list[dict[str, Any]] = [
                {
                    "attempt": state.stored_attempt, "rank": state.rank, "world": state.world, "node": settings.node,
                    "host": socket.gethostname(), "pid": state.pid, **state.coord, "cores": cores,
                    "peak_flops": float(state.peak_flops), "start_ns": round(state.start * 1e9),
                } for state in states
            ]  # fmt: skip
            store.replace("ranks", _columns("ranks", rows))
            self._known |= ready.keys()
        while self._waiting:
            start_ms, end_ms, tables = self._waiting[0]
            while tables:
                table = next(iter(tables))
                store.write(table, tables[table], start_ms, end_ms)
                del tables[table]
            self._waiting.popleft()
        if self._states:
            epoch_ns, attempt = self._epoch_ns(), self._stored_attempt
            rows = [
                {"attempt": attempt, "rank": rank, "time_ns": state.read_ns + epoch_ns,
                 "record": json.dumps(state.to_dict())} for rank, state in self._states.items()
            ]  # fmt: skip
            store.replace("states", _columns("states", rows))
        store.prune()

    def _open_store(self, ready: Mapping[int, RankRows], settings: StoreSettings) -> NodeStore:
        """Return the store of the present attempt, whose number a log has once its rank trains."""
        state = next(iter((ready or self._ranks).values())).log.state(head_only=True)
        attempt = state.attempt if state.stored_attempt is None else state.stored_attempt
        if self._store is not None and attempt != self._stored_attempt:
            self._store.discard("states")
            self._store = self._spread = None
        if self._store is None:
            self._store, self._stored_attempt = NodeStore(settings, attempt, self._say), attempt
        return self._store

    def _epoch_ns(self) -> int:
        """Ns since 1970 on rank 0's clock at the zero of this host's monotonic clock; on this host's clock, if no rank
        trains.
        """
        first = next(iter(self.ranks.values()), None)
        return first.log.state(head_only=True).epoch_ns if first else time.time_ns() - time.monotonic_ns()

    def read_states(self) -> None:
        """Read the states of the ranks."""
        self._states = {rank: rows.log.state() for rank, rows in self._ranks.items()}

    def _host_rows(self, node: str) -> list[dict[str, Any]]:
        """Return the samples of the host's metrics since the last call, by rank 0's clock."""
        to_rank_0 = self._epoch_ns() - (time.time_ns() - time.monotonic_ns())
        samples = [self._host_metrics.popleft() for _ in range(len(self._host_metrics))]
        return [
            {"node": node, "time_ns": at + to_rank_0, "metric": name, "value": value}
            for at, metrics in samples for name, value in metrics.items()
        ]  # fmt: skip


def _columns(table: str, rows: Sequence[Mapping[str, Any]]) -> Columns:
    return {column.name: [row[column.name] for row in rows] for column in TABLES[table]}


class CollectorThread:
    """Runs a collector until `finish`."""

    def __init__(self, collector: Collector, say: Say) -> None:
        self.collector = collector
        self._say = say
        self._stop, self._drained = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="event store", daemon=True)
        with contextlib.suppress(RuntimeError):  # this process may have no thread left
            self._thread.start()

    def _run(self) -> None:
        try:
            written = time.monotonic()
            while not self._stop.wait(POLL_S):
                self.collector.poll()
                if time.monotonic() - written >= self.collector.interval_s:
                    self.collector.read_states()
                    self.collector.write()
                    written = time.monotonic()
            self.collector.poll()
            self.collector.read_states()
            self._drained.set()
            self.collector.write()
            if missing := self.collector.missing():
                self._say(f"WARNING: the rows of {missing} intervals never reached the event store")
        except (MegascaleError, ValueError, TypeError, ArithmeticError, LookupError, MemoryError) as error:
            self._say(f"WARNING: no more events are stored: {error!r}")
        finally:
            self._drained.set()

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Begin to finish, and return once all is read, at the latest after `timeout_s`: files may be removed."""
        self._stop.set()
        self._drained.wait(timeout_s)

    def finish(self, timeout_s: float = FINISH_S) -> None:
        """Drain the logs a last time and write; give up a store that takes longer than `timeout_s`."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._say(f"WARNING: the event store does not answer: its last rows were not written in {timeout_s:g} s")
