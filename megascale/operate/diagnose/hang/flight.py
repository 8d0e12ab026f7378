"""Analysis of NCCL's flight recorder: find the rank that other ranks wait for, from the dumps in the run's folder.

When an operation exceeds its group's timeout, every rank dumps its last operations: the watchdog of the waiting rank
asks the other ranks through the store. A minute later the watchdogs end the waiting ranks, but not a stuck rank. Rank a
waits for rank b if a has started and not finished an operation that b has not started. The suspect is a rank that
others wait for and that waits for no rank.

- `find_suspect`: the analysis; `python -m megascale.operate.diagnose.hang.flight FOLDER` prints its result
- `read_waits`: what it is made of; `hang.dumped_records` makes states of ranks of it
- `dump_prefix`, `make_dump_folder`: the folder of the dumps

Dumps are in the format of torch.distributed.flight_recorder, version 2: a pickle of plain containers.
"""

from __future__ import annotations

import json
import pickle
import re
import socket
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megascale.core.rank import format_ranks

DUMP_FOLDER = "flight"
"""Name of the dumps' folder in the run's folder."""

MOST_BYTES = 256 << 20
"""Most bytes of a dump. 2,000 operations with their stacks take less than 10 MB."""

_NAME = re.compile(r"(?P<host>.*)_rank_(?P<rank>\d+)")
_DUMP_ERRORS = (
    OSError, pickle.UnpicklingError, EOFError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
    MemoryError, RecursionError,
)  # fmt: skip
_POINT_TO_POINT = re.compile(r"(?P<kind>send|recv) (?P<self>\d+)(?:->|<-)(?P<peer>\d+)")


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
class FlightOperation:
    """An operation that a rank has started.

    `sequence_id` counts the group's collectives, or this rank's messages in the group. `members`: the group's ranks in
    order. `endpoints`: sender and receiver of a message. `started_at`: seconds since the epoch.
    """

    group: str
    description: str
    name: str
    sequence_id: int
    members: tuple[int, ...]
    endpoints: tuple[int, int] | None
    started_at: float


@dataclass(frozen=True)
class Suspect:
    """The rank that other ranks wait for. `host` is None without a dump of the rank."""

    rank: int
    host: str | None
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''} {self.reason}"


class FlightDump:
    """The operations that a rank on `host` had started, the last at `last_started_at`, in seconds since the epoch as
    `written_at`. `groups`: ranks by name of the
    group, `descriptions`: of the groups with an operation.

    Raises: an error of `_DUMP_ERRORS` if `recorded` is not in the flight recorder's format.
    """

    def __init__(self, host: str, recorded: Mapping[str, Any], written_at: float = 0.0) -> None:
        self.host, self.written_at = host, written_at
        self.groups = {name: _ranks(group["ranks"]) for name, group in recorded["pg_config"].items()}
        self._entries: list[Mapping[str, Any]] = [_checked_entry(entry) for entry in recorded.get("entries", [])]
        self.last_started_at = max((entry["time_created_ns"] / 1e9 for entry in self._entries), default=0.0)
        self.last_collective_id: dict[str, int] = {}
        self.descriptions: dict[str, str] = dict(entry["process_group"] for entry in self._entries)
        for entry in self._entries:
            if not entry["is_p2p"]:
                self.last_collective_id[entry["process_group"][0]] = entry["collective_seq_id"]

    @cached_property
    def unfinished(self) -> list[FlightOperation]:
        """The operations that were started and are not done.

        The operations of a batch have no end; the entry "coalesced" after them has the end of the batch.
        """
        launches: dict[tuple[str, int, int], list[Mapping[str, Any]]] = {}
        for entry in self._entries:
            key = entry["process_group"][0], entry["collective_seq_id"], entry["p2p_seq_id"]
            launches.setdefault(key, []).append(entry)
        batches = [batch for batch in launches.values() if not _is_completed(batch[-1])]
        return [self._operation(entry) for batch in batches for entry in (batch[:-1] or batch)]

    def _operation(self, entry: Mapping[str, Any]) -> FlightOperation:
        group, description = entry["process_group"]
        members = self.groups.get(group, ())
        name = entry["profiling_name"].partition(":")[2]
        endpoints = None
        if (message := _POINT_TO_POINT.fullmatch(name)) and len(members) > 1:
            name, rank, peer = message["kind"], members[int(message["self"])], members[int(message["peer"])]
            endpoints = (rank, peer) if name == "send" else (peer, rank)
        sequence = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        return FlightOperation(group, description, name, sequence, members, endpoints, entry["time_created_ns"] / 1e9)

    def has_started(self, operation: FlightOperation) -> bool:
        """Return True if this rank has started another rank's operation. A pair's messages complete in order, so a
        message that the peer waits for is unfinished here too, if started.
        """
        if operation.endpoints is None:
            return self.last_collective_id.get(operation.group, -1) >= operation.sequence_id
        return any(o.group == operation.group and o.endpoints == operation.endpoints for o in self.unfinished)


ReadDump = Callable[[int], FlightDump | None]
"""Function (rank): return the rank's dump; None without a readable dump."""


class DumpedWaits(NamedTuple):
    """The `dumps` that were read, None for one that cannot be; the wait graph from the first waiting rank on: by rank,
    the (missing rank, operation) that it waits for. `dumped`: all ranks with a dump.
    """

    dumps: Mapping[int, FlightDump | None]
    waits: Mapping[int, Sequence[tuple[int, FlightOperation]]]
    dumped: Container[int]

    def operations(self, rank: int) -> list[FlightOperation]:
        """Return the operations that a rank has started and others have not, as far as their dumps were read."""
        dump = self.dumps.get(rank)
        unfinished = dump.unfinished if dump else []
        return [operation for operation in unfinished if _missing(operation, self.dumped, self.dumps.get)]


def find_suspect(folder: Path) -> Suspect | None:
    """Return the rank that the other ranks wait for; None without dumps, or if no rank waits."""
    found = read_waits(folder)
    return _suspect(found.waits, found.dumps.get) if found is not None else None


def read_waits(folder: Path) -> DumpedWaits | None:
    """Return the waits in the dumps of a folder; None without dumps, or if no rank waits.

    From the first waiting rank on, only dumps of groups in which a rank waits are read.
    """
    paths = _dumps(folder)
    dumps: dict[int, FlightDump | None] = {}

    def read(rank: int) -> FlightDump | None:
        if rank in paths and rank not in dumps:
            dumps[rank] = _read(paths[rank])
        return dumps.get(rank)

    for first in sorted(paths):
        waits = _waits(first, paths, read)
        if any(waits.values()):
            return DumpedWaits(dumps, waits, paths)
    return None


def _waits(first: int, paths: Container[int], read: ReadDump) -> dict[int, list[tuple[int, FlightOperation]]]:
    """Return the wait graph from rank `first` on: by rank, the (missing rank, operation) that it waits for."""
    waits: dict[int, list[tuple[int, FlightOperation]]] = {}
    to_visit = [first]
    while to_visit:
        rank = to_visit.pop()
        if rank not in waits:
            dump = read(rank)
            unfinished = dump.unfinished if dump else []
            waits[rank] = [(missing, op) for op in unfinished for missing in _missing(op, paths, read)]
            to_visit += [missing for missing, _ in waits[rank]]
    return waits


def _missing(operation: FlightOperation, paths: Container[int], read: ReadDump) -> list[int]:
    """Return the ranks that have not started an operation. A rank with an unreadable dump counts as started."""
    ranks = operation.endpoints or operation.members
    return [rank for rank in ranks if rank not in paths or ((dump := read(rank)) and not dump.has_started(operation))]


def _suspect(waits: Mapping[int, Sequence[tuple[int, FlightOperation]]], read: ReadDump) -> Suspect:
    """Choose among the ranks that others wait for: a rank without a dump, else a rank that waits for no rank, else the
    rank whose last operation started first.
    """
    awaited: dict[int, list[FlightOperation]] = {}
    for rank_waits in waits.values():
        for missing, operation in rank_waits:
            awaited.setdefault(missing, []).append(operation)
    last_start = {rank: dump.last_started_at for rank in awaited if (dump := read(rank))}
    silent = [rank for rank in awaited if rank not in last_start]
    idle = [rank for rank in awaited if not waits[rank]]
    rank = min(silent or idle or awaited, key=lambda rank: (last_start.get(rank, 0.0), rank))
    operation = min(awaited[rank], key=lambda op: (op.started_at, op.group))
    waiting = [r for r in operation.endpoints or operation.members if (d := read(r)) and d.has_started(operation)]
    dump = read(rank)
    if dump:
        return Suspect(rank, dump.host, _describe_wait(operation, waiting))
    also_silent = sorted(set(silent) - {rank})
    also = f", nor did {format_ranks(also_silent)}" if also_silent else ""
    return Suspect(rank, None, f"{_describe_wait(operation, waiting)}; it left no dump{also}")


def _describe_wait(operation: FlightOperation, waiting: Sequence[int]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(operation.started_at))
    group = f"group {operation.description}"
    if operation.endpoints is None:
        wait = f"{format_ranks(waiting)} wait" if len(waiting) > 1 else f"{format_ranks(waiting)} waits"
        return f"never joined {operation.name} {operation.sequence_id} of {group}, in which {wait} since {since}"
    if operation.name == "recv":
        return f"never sent the message of {group} for which rank {operation.endpoints[1]} waits since {since}"
    return f"never received the message of {group} that rank {operation.endpoints[0]} sends since {since}"


def _is_completed(entry: Mapping[str, Any]) -> bool:
    """Return True if an operation is done. gloo retires only completed operations, NCCL also timed-out operations."""
    return entry["state"] == "completed" or (entry["retired"] and entry["profiling_name"].startswith("gloo:"))


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


def _checked_entry(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `entry` if its fields have the expected types. Raises: TypeError"""
    for name, has_type in _FIELDS.items():
        if not has_type(entry[name]):
            raise TypeError(f"{name} in a dump has an unexpected type: {entry[name]!r}")
    return entry


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


def _read(path: Path) -> FlightDump | None:
    """Read a rank's dump; return None, with a line on stderr, for an invalid or truncated file."""
    match = _NAME.fullmatch(path.name)
    try:
        if match is None or path.stat().st_size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        with path.open("rb") as file:
            dump = FlightDump(match["host"], _SafeUnpickler(file).load(), path.stat().st_mtime)
        dump.unfinished  # noqa: B018  raises here if the entries are invalid
    except _DUMP_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"[:200].replace("\n", " ")
        print(f"megascale: the flight record {path} cannot be read and is left out: {reason}", file=sys.stderr)
        return None
    return dump


def main(folders: Sequence[str]) -> Iterator[str]:
    """Yield a line of report for every folder of dumps."""
    for folder in folders:
        yield f"{folder}: {find_suspect(Path(folder)) or 'no rank is known to wait for another'}"


if __name__ == "__main__":
    for line in main(sys.argv[1:]):
        print(line)
