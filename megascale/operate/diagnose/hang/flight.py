"""Dumps of NCCL's flight recorder in the run's folder, as the states of ranks that the analysis of a hang reads.

When an operation exceeds its group's timeout, every rank dumps its last operations: the watchdog of the waiting rank
asks the other ranks through the store. A minute later the watchdogs end the waiting ranks, but not a stuck rank. Rank a
waits for rank b if a has started and not finished an operation that b has not started. The suspect is a rank that
others wait for and that waits for no rank. What the host waits for is not in a dump: a rank with one operation that
others have not started waits there, a rank with several waits for its device.

- `find_suspect`: a line about the suspect; `python -m megascale.operate.diagnose.hang.flight FOLDER` prints it
- `read_dumped_records`: states of ranks, for `hang.hang`
- `dump_prefix`, `make_dump_folder`: the folder of the dumps

Dumps are in the format of torch.distributed.flight_recorder, version 2: a pickle of plain containers. Their sequence
numbers of collectives are torch's; those of messages count the ones in flight, whose first is the same at both ends.
"""

from __future__ import annotations

import json
import pickle
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megascale.core.rank import format_ranks
from megascale.record.layout import COLLECTIVE, RECEIVE, SEND, Phase
from megascale.record.rank_state import FlightEvent, GroupState, RankRuns, RankState, Wait

DUMP_FOLDER = "flight"  # name of the dumps' folder in the run's folder
MADE_OF_DUMP = 0  # the `pid` of a state that is made of a dump
MOST_BYTES = 256 << 20  # most bytes of a dump; 2,000 operations with their stacks take less than 10 MB

_NAME = re.compile(r"(?P<host>.*)_rank_(?P<rank>\d+)")
_DUMP_ERRORS = (
    OSError, pickle.UnpicklingError, EOFError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
    MemoryError, RecursionError,
)  # fmt: skip
_POINT_TO_POINT = re.compile(r"(?P<kind>send|recv) \d+(?:->|<-)(?P<peer>\d+)")


def dump_prefix(run: Path) -> str:
    """Return the path of this host's dumps, up to the rank's number."""
    return str((run / DUMP_FOLDER).absolute() / f"{socket.gethostname()}_rank_")


def make_dump_folder(run: Path) -> None:
    """Make the folder of a run's dumps, which torch does not, and remove the dumps of earlier attempts."""
    folder = run / DUMP_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    for path in _dumps(folder).values():
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Suspect:
    """The rank that other ranks wait for. `host` is None without a dump of the rank."""

    rank: int
    host: str | None
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''} {self.reason}"


def find_suspect(folder: Path) -> Suspect | None:
    """Return the rank that the other ranks wait for: a rank without a dump, else a rank that waits for no rank, else
    the rank whose last operation started first. None without dumps, or if no rank waits.
    """
    dumps = _Dumps(folder)
    states = dumps.states
    awaited: dict[int, list[tuple[int, FlightEvent]]] = {}
    for waiting, waits in dumps.waits.items():
        for missing, event in waits:
            awaited.setdefault(missing, []).append((waiting, event))
    if not awaited:
        return None
    last_ns = {rank: state.updated_ns for rank in awaited if (state := states.get(rank))}
    silent = [rank for rank in awaited if rank not in last_ns]
    idle = [rank for rank in awaited if not dumps.waits[rank]]
    rank = min(silent or idle or awaited, key=lambda rank: (last_ns.get(rank, 0), rank))
    waiting, event = min(awaited[rank], key=lambda wait: (wait[1].issued_ns, wait[1].group.partition(" ")[0]))
    reason = _describe_wait(dumps, waiting, event)
    if state := states.get(rank):
        return Suspect(rank, state.node, reason)
    also_silent = sorted(set(silent) - {rank})
    also = f", nor did {format_ranks(also_silent)}" if also_silent else ""
    return Suspect(rank, None, f"{reason}; it left no dump{also}")


def _describe_wait(dumps: _Dumps, rank: int, event: FlightEvent) -> str:
    """Return what the rank that `rank` waits for has not done."""
    group = dumps.group(rank, event)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.issued_ns / 1e9))
    name = f"group {group.name}"
    if event.kind == RECEIVE:
        return f"never sent the message of {name} for which rank {rank} waits since {since}"
    if event.kind == SEND:
        return f"never received the message of {name} that rank {rank} sends since {since}"
    waiting = [one for one in group.ranks or () if dumps.states.get(one) and not dumps.lacks(one, rank, event)]
    wait = f"{format_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''}"
    return f"never joined {event.name} {event.sequence} of {name}, in which {wait} since {since}"


def read_dumped_records(folder: Path, run: str, world: int) -> dict[int, RankState]:
    """Return the states of ranks in groups in which a rank waits. Empty without such a rank, if every awaited rank
    waits itself, which dumps alone do not resolve, or if a dump cannot be read.
    """
    dumps = _Dumps(folder)
    awaited = {missing for waits in dumps.waits.values() for missing, _ in waits}
    if None in dumps.states.values() or all(dumps.waits.get(rank) for rank in awaited):
        return {}
    states = {rank: state for rank, state in sorted(dumps.states.items()) if state is not None}
    read_ns = max(state.read_ns for state in states.values())
    found = {}
    for rank, state in states.items():
        awaiting = [event for event in state.open if any(dumps.lacks(one, rank, event) for one in _ends(state, event))]
        places = {(event.group, event.sequence) for event in awaiting}
        since_ns = min((event.issued_ns for event in awaiting), default=0)
        wait = Wait("waiting", *places.pop(), since_ns) if len(places) == 1 else Wait("device", "", 0, since_ns)
        found[rank] = replace(state, run=run, world=world, heartbeat_ns=read_ns, read_ns=read_ns,
                              wait=wait if awaiting else None)  # fmt: skip
    return found


class _Dumps:
    """The dumps of a folder: from the first waiting rank on, only those of groups in which a rank waits are read.

    `states`: of the ranks whose dumps were read, None for one that cannot be; `waits`: by rank, the (missing rank,
    event) that it waits for, empty if no rank waits.
    """

    def __init__(self, folder: Path) -> None:
        self._paths = _dumps(folder)
        self.states: dict[int, RankState | None] = {}
        self.waits: dict[int, list[tuple[int, FlightEvent]]] = {}
        for first in sorted(self._paths):
            self._follow(first)
            if any(self.waits.values()):
                return
        self.waits = {}

    def _follow(self, first: int) -> None:
        """Follow the waits from a rank on."""
        self.waits, to_visit = {}, [first]
        while to_visit:
            rank = to_visit.pop()
            if rank in self.waits:
                continue
            self.waits[rank] = []
            if (state := self._read(rank)) is None:
                continue
            for event in state.open:
                ends = _ends(state, event)
                for other in ends:
                    self._read(other)
                self.waits[rank] += [(other, event) for other in ends if self.lacks(other, rank, event)]
            to_visit += [missing for missing, _ in self.waits[rank]]

    def _read(self, rank: int) -> RankState | None:
        if rank in self._paths and rank not in self.states:
            self.states[rank] = _read(self._paths[rank])
        return self.states.get(rank)

    def group(self, rank: int, event: FlightEvent) -> GroupState:
        """Return the group of an event of a rank."""
        state = self.states[rank]
        assert state is not None
        return state.groups[event.group]

    def lacks(self, other: int, rank: int, event: FlightEvent) -> bool:
        """Return True if a rank has not started an event of `rank`. A rank whose dump is not read, or unreadable,
        counts as started. A pair's messages complete in order, so a message that the peer waits for is unfinished here
        too, if started.
        """
        if other not in self._paths:
            return True
        state, key = self.states.get(other), event.group
        if event.peer >= 0:
            side = RECEIVE if event.kind == SEND else SEND
            key = f"{self.group(rank, event).name} {side} {rank}"
        return state is not None and (key not in state.groups or state.groups[key].issued <= event.sequence)


def _ends(state: RankState, event: FlightEvent) -> Sequence[int]:
    """Return the ranks that an event of a rank needs."""
    group = state.groups.get(event.group)
    return (event.peer,) if event.peer >= 0 else tuple(group.ranks or ()) if group else ()


def _state_of(rank: int, host: str, recorded: Mapping[str, Any], written_ns: int) -> RankState:
    """Return what a rank had started, and what has not ended, by its dump.

    The operations of a batch have no end; the entry "coalesced" after them has the end of the batch.
    Raises: an error of `_DUMP_ERRORS` if `recorded` is not in the flight recorder's format
    """
    ranks = {name: _ranks(group["ranks"]) for name, group in recorded["pg_config"].items()}
    runs = {name: RankRuns.from_ranks(members) for name, members in ranks.items()}
    entries = recorded.get("entries", [])
    launches: dict[tuple[str, int, int], list[Mapping[str, Any]]] = {}
    last: dict[str, tuple[str, int]] = {}
    for entry in entries:
        for name, has_type in _FIELDS.items():
            if not has_type(entry[name]):
                raise TypeError(f"{name} in a dump has an unexpected type: {entry[name]!r}")
        group, _ = entry["process_group"]
        launches.setdefault((group, entry["collective_seq_id"], entry["p2p_seq_id"]), []).append(entry)
        if not entry["is_p2p"]:
            last[group] = _group_name(entry), entry["collective_seq_id"] + 1
    # gloo retires only completed operations, NCCL also timed-out operations
    batches = [
        batch for batch in launches.values() if batch[-1]["state"] != "completed"
        and not (batch[-1]["retired"] and batch[-1]["profiling_name"].startswith("gloo:"))
    ]  # fmt: skip
    groups, events = dict[str, GroupState](), list[FlightEvent]()
    for entry in (entry for batch in batches for entry in (batch[:-1] or batch)):
        group, _ = entry["process_group"]
        events.append(event := _event(entry, ranks.get(group, ())))
        if event.peer >= 0:
            count = groups[event.group].issued + 1 if event.group in groups else 1
            name = _group_name(entry)
            groups[event.group] = GroupState(name, event.kind, runs[group], count, count, 0, event.peer)
        else:  # the batch of messages of a group that has had no collective
            groups.setdefault(event.group, GroupState(event.group, COLLECTIVE, runs.get(group, RankRuns(())), 0, 0, 0))
    for group, (name, issued) in last.items():
        ended = min((event.sequence for event in events if event.group == name), default=issued)
        groups[name] = GroupState(name, COLLECTIVE, runs.get(group, RankRuns(())), issued, issued, ended)
    updated_ns = max((entry["time_created_ns"] for entry in entries), default=0)
    return RankState(
        "", rank, 0, MADE_OF_DUMP, 0, 0.0, 0, written_ns, updated_ns, written_ns, Phase.STEP, updated_ns, 0, 0.0, {},
        groups, None, tuple(events), tuple(events), node=host,
    )  # fmt: skip


def _event(entry: Mapping[str, Any], members: Sequence[int]) -> FlightEvent:
    """Return an operation that has not ended. `members`: the ranks of its group, in order."""
    name, key, began_ns = entry["profiling_name"].partition(":")[2], _group_name(entry), entry["time_created_ns"]
    if (message := _POINT_TO_POINT.fullmatch(name)) and len(members) > 1:
        kind, peer = SEND if message["kind"] == "send" else RECEIVE, members[int(message["peer"])]
        key = f"{key} {kind} {peer}"
        return FlightEvent(kind, message["kind"], key, 0, peer, 0, -1, -1, began_ns, began_ns, 0)
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    return FlightEvent(COLLECTIVE, name, key, number, -1, 0, -1, -1, began_ns, began_ns, 0)


def _group_name(entry: Mapping[str, Any]) -> str:
    """Return a group's description, which is the same on all ranks; its name, if it was opened without one."""
    group, description = entry["process_group"]
    return (group if description == "undefined" else description).replace(" ", "_")


def _is_int64(value: object) -> bool:
    """Return True for an integer of 64 bits, the flight recorder's only type of number."""
    return type(value) is int and -(2**63) <= value < 2**63


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "process_group": lambda value: len(value) == 2 and all(type(name) is str for name in value),
    "collective_seq_id": _is_int64,
    "p2p_seq_id": _is_int64,
    "time_created_ns": _is_int64,
    "profiling_name": lambda value: type(value) is str,
    "state": lambda value: type(value) is str,
    "retired": lambda value: type(value) is bool,
    "is_p2p": lambda value: type(value) is bool,
}
"""The fields read from an operation, with a check of the type."""


def _ranks(recorded: str | Sequence[int]) -> tuple[int, ...]:
    """Return a group's ranks. Raises: TypeError if `recorded` is not a list of integers."""
    ranks = json.loads(recorded) if isinstance(recorded, str) else recorded
    if not all(_is_int64(rank) for rank in ranks):
        raise TypeError("ranks in a dump are not integers")
    return tuple(ranks)


def _dumps(folder: Path) -> dict[int, Path]:
    named = ((match, path) for path in folder.glob("*_rank_*") if (match := _NAME.fullmatch(path.name)))
    return {int(match["rank"]): path for match, path in named}


class _SafeUnpickler(pickle.Unpickler):
    """Unpickler of containers, numbers and strings only: imports nothing that a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump names {module}.{name}")


def _read(path: Path) -> RankState | None:
    """Read a rank's dump; return None, with a line on stderr, for an invalid or truncated file."""
    match = _NAME.fullmatch(path.name)
    try:
        if match is None or path.stat().st_size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        with path.open("rb") as file:
            return _state_of(int(match["rank"]), match["host"], _SafeUnpickler(file).load(), path.stat().st_mtime_ns)
    except _DUMP_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"[:200].replace("\n", " ")
        print(f"megascale: the flight record {path} cannot be read and is left out: {reason}", file=sys.stderr)
        return None


def main(folders: Sequence[str]) -> Iterator[str]:
    """Yield a line of report for every folder of dumps."""
    for folder in folders:
        yield f"{folder}: {find_suspect(Path(folder)) or 'no rank is known to wait for another'}"


if __name__ == "__main__":
    for line in main(sys.argv[1:]):
        print(line)
