"""The last known state of every rank of a run: its flight record in shared memory while the rank lives on this host,
else its newest row in the event store. Where neither is left: from the dumps of torch's flight recorder.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megascale.core.errors import Exit, MegascaleError
from megascale.core.rank import format_ranks
from megascale.operate.diagnose.hang.flight import DUMP_FOLDER, find_suspect, read_dumped_records
from megascale.operate.show.run_view import RunView
from megascale.operate.store.query import StoreError, fetch
from megascale.operate.store.reading import read_store
from megascale.record.log_files import local_states, process_states
from megascale.record.rank_state import LogError, RankState

SHARED, STORED, DUMPED = "shared memory of this host", "event store", "dumps of torch's flight recorder"
"""Where a state was found."""

_TABLES = ("states", "ranks")
_NEWEST = "QUALIFY row_number() OVER (PARTITION BY rank ORDER BY {} DESC) = 1 ORDER BY rank"
_STATES = f"""
    SELECT rank, time_ns, record FROM states WHERE attempt = (SELECT max(attempt) FROM states)
    {_NEWEST.format("time_ns")}"""
_NODES = f"SELECT rank, node FROM ranks {_NEWEST.format('attempt')}"


class StatesError(MegascaleError):
    """A run of whose ranks no state can be read."""

    exit_status = Exit.CONFIG


@dataclass(frozen=True)
class LastStates:
    """The last states of the ranks of a run, by rank, each with its `source`. `notes`: what could not be read."""

    by_rank: Mapping[int, RankState]
    notes: tuple[str, ...] = ()

    def nodes(self, ranks: Iterable[int]) -> list[str]:
        """Return the known nodes of ranks."""
        return sorted({self.by_rank[rank].node for rank in ranks if rank in self.by_rank} - {""})

    def sources(self) -> dict[str, list[int]]:
        """Return the ranks by the source of their states."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for rank, state in self.by_rank.items():
            found[state.source].append(rank)
        return dict(found)


def read_last_states(view: RunView, clock: Callable[[], float] = time.time) -> LastStates:
    """Return the last states of a run's ranks. Raises: StatesError for a store with damaged files or rows only"""
    live = local_states(view.folder) if view.is_live else {}
    letters = process_states(live)
    found = {rank: replace(state, source=SHARED, letter=letters.get(rank, "")) for rank, state in live.items()}
    nodes, stored, damaged = dict[int, str](), dict[int, RankState](), list[int]()
    try:
        read = read_store(view.folder, lambda store: (fetch(store, _STATES), fetch(store, _NODES)), tables=_TABLES)
        (states, ranks), notes = read.value, read.notes
        nodes = dict(zip(ranks["rank"].tolist(), ranks["node"].tolist(), strict=True))
        if len(found) < view.world:
            stored, damaged = _parse(states, view, clock())
    except StoreError as error:
        notes = (f"without the event store: {error.message}",)
    if live:
        attempt = max(state.attempt for state in live.values())
        stored = {rank: state for rank, state in stored.items() if state.attempt == attempt}
    if damaged:
        what = f"the event store has no readable state of {format_ranks(damaged)}"
        if not (stored or found):
            raise StatesError(f"{view.folder}: {what}", hint="remove the damaged files from its folder states")
        notes = (*notes, what)
    host = socket.gethostname()
    named = {
        rank: replace(state, node=nodes.get(rank, host if state.source == SHARED else ""))
        for rank, state in sorted((stored | found).items())
    }
    return LastStates(named, notes)


def _parse(states: Mapping[str, np.ndarray], view: RunView, now: float) -> tuple[dict[int, RankState], list[int]]:
    """Return the states in rows of the event store, and the ranks whose rows are damaged."""
    found, damaged = {}, []
    known = view.states.ranks if view.is_live or view.states.stale else ()
    for rank, at_ns, text in zip(*(states[name].tolist() for name in ("rank", "time_ns", "record")), strict=True):
        try:
            state = RankState.from_dict(json.loads(text))
        except (LogError, ValueError, TypeError):
            damaged.append(rank)
            continue
        letter = known[rank].state if rank < len(known) else ""
        found[rank] = replace(state, source=STORED, age_s=max(0.0, now - at_ns / 1e9), letter=letter)
    return found, damaged


def notes_of_age(view: RunView, states: LastStates, idle_s: float) -> list[str]:
    """Return notes about states of a live run from before the last progress of the job, `idle_s` ago."""
    old = [rank for rank, state in states.by_rank.items() if state.age_s > max(1.0, idle_s)]
    missing = sorted(set(range(view.world)) - states.by_rank.keys())
    notes = [f"the states of {format_ranks(old)} are from before the hang: read the verdict with care"] if old else []
    return notes + ([f"nothing is known about {format_ranks(missing)}"] if missing else [])


def read_last_state(view: RunView, rank: int) -> RankState | None:
    """Return the last state of one rank: of the event store only its own row is read."""
    if view.is_live and (state := local_states(view.folder).get(rank)) is not None:
        return replace(state, source=SHARED)
    newest = "SELECT record FROM states WHERE rank = ? ORDER BY time_ns DESC LIMIT 1"
    with contextlib.suppress(StoreError, LogError, ValueError):
        rows = read_store(view.folder, lambda store: fetch(store, newest, [rank]), tables=("states",)).value
        return next((replace(RankState.from_dict(json.loads(text)), source=STORED) for text in rows["record"]), None)
    return None


def read_dumped_states(view: RunView, clock: Callable[[], float] = time.time) -> LastStates:
    """Return the last states of a run's ranks from the dumps of torch's flight recorder; without them none."""
    dumped = read_dumped_records(view.folder / DUMP_FOLDER, view.name, view.world)
    now = clock()
    ages = {rank: max(0.0, now - state.read_ns / 1e9) for rank, state in dumped.items()}
    return LastStates({rank: replace(state, source=DUMPED, age_s=ages[rank]) for rank, state in dumped.items()})


def describe_dumps(run: Path) -> tuple[str, bool]:
    """Return what the dumps of torch's flight recorder say, "" without dumps, and True if they name a rank."""
    count = sum(1 for _ in (run / DUMP_FOLDER).glob("*_rank_*"))
    if not count:
        return "", False
    suspect = find_suspect(run / DUMP_FOLDER)
    text = f"{count} dump{'s' if count > 1 else ''}: {suspect or 'no rank is known to wait for another'}"
    return text, suspect is not None
