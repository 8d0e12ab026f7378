"""The last known state of every rank of a run: its flight record in shared memory while the rank lives on this host,
else its newest row in the event store. Where neither is left: from the dumps of torch's flight recorder.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megascale.core.errors import Exit, MegascaleError
from megascale.core.rank import format_ranks
from megascale.operate.diagnose.hang.flight import DUMP_FOLDER, read_dumped_records
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

    @property
    def letters(self) -> dict[int, str]:
        """The letters of the processes' states, as far as known, by rank."""
        return {rank: state.letter for rank, state in self.by_rank.items() if state.letter}

    @property
    def nodes(self) -> dict[int, str]:
        """The nodes, as far as known, by rank."""
        return {rank: state.node for rank, state in self.by_rank.items() if state.node}

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
    notes: tuple[str, ...] = ()
    nodes: dict[int, str] = {}
    try:
        rows, nodes, notes = _stored(view)
    except StoreError as error:
        rows = {}
        notes = (f"without the event store: {error.message}",)
    stored, damaged = _parse(rows, view, clock()) if len(found) < view.world else ({}, [])
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
    states = read_dumped_records(view.folder / DUMP_FOLDER, view.name, view.world)
    now = clock()
    return LastStates(
        {
            rank: replace(state, source=DUMPED, age_s=max(0.0, now - state.read_ns / 1e9))
            for rank, state in states.items()
        }
    )


def _stored(view: RunView) -> tuple[dict[int, tuple[int, str]], dict[int, str], tuple[str, ...]]:
    """Return (time in ns, record as JSON) and the node of each rank in the event store, and what is told of damaged
    files.

    Raises: StoreError
    """
    read = read_store(view.folder, lambda store: (fetch(store, _STATES), fetch(store, _NODES)), tables=_TABLES)
    states, ranks = read.value
    rows = zip(*(states[name].tolist() for name in ("rank", "time_ns", "record")), strict=True)
    nodes = zip(ranks["rank"].tolist(), ranks["node"].tolist(), strict=True)
    return {rank: (at_ns, text) for rank, at_ns, text in rows}, dict(nodes), read.notes


def _parse(rows: Mapping[int, tuple[int, Any]], view: RunView, now: float) -> tuple[dict[int, RankState], list[int]]:
    """Return the states in rows of the event store, and the ranks whose rows are damaged."""
    found, damaged = {}, []
    known = view.states.ranks if view.is_live or view.states.stale else ()
    for rank, (at_ns, text) in rows.items():
        try:
            state = RankState.from_dict(json.loads(text))
        except (LogError, ValueError, TypeError):
            damaged.append(rank)
            continue
        letter = known[rank].state if rank < len(known) else ""
        found[rank] = replace(state, source=STORED, age_s=max(0.0, now - at_ns / 1e9), letter=letter)
    return found, damaged
