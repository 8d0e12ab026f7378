"""Which rank the others wait for, by what NCCL's flight recorder left in the run's folder.

When an operation takes longer than its group's timeout, every rank writes the last operations that it started: the
watchdog of the rank that waited asks the others through the store. A minute later the watchdogs end the ranks that
waited, but not the one that never came. A rank waits for those that have not started an operation that it has not
finished. The one to look at is waited for and waits for nobody.

The format is that of torch.distributed.flight_recorder, version 2: a pickle of plain containers.
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
from functools import cache, cached_property
from pathlib import Path
from typing import Any

FOLDER = "flight"
"""In the run's folder."""

MOST_BYTES = 256 << 20
"""Most bytes of one dump. Two thousand operations with their stacks take less than ten million."""

_NAME = re.compile(r"(?P<host>.*)_rank_(?P<rank>\d+)")
_BROKEN = (
    OSError, pickle.UnpicklingError, EOFError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
    MemoryError, RecursionError,
)  # fmt: skip
_POINT_TO_POINT = re.compile(r"(?P<what>send|recv) (?P<self>\d+)(?:->|<-)(?P<peer>\d+)")


def prefix(run: Path) -> str:
    """The prefix of a dump's name before the rank's number; it has the host's name."""
    return str((run / FOLDER).absolute() / f"{socket.gethostname()}_rank_")


def prepare(run: Path) -> None:
    """Make the folder of a run's dumps, for torch does not, and leave none of an earlier attempt in it."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    for path in _dumps(folder).values():
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Operation:
    """An operation that a rank has started. `sequence` counts the group's collectives, or this rank's messages in it.

    `members`: the group's ranks in its order. `ends`: sender and receiver of a message. `since`: seconds of the clock.
    """

    group: str
    description: str
    name: str
    sequence: int
    members: tuple[int, ...]
    ends: tuple[int, int] | None
    since: float


@dataclass(frozen=True)
class Suspect:
    """The rank that others wait for. `host` is None if it left no dump."""

    rank: int
    host: str | None
    what: str

    def __str__(self) -> str:
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''} {self.what}"


class Dump:
    """The operations that one rank had started. `host`: where it ran. `last`: when it started its last operation.

    Raises: one of `_BROKEN` if `recorded` is not what the flight recorder writes.
    """

    def __init__(self, host: str, recorded: Mapping[str, Any]) -> None:
        self.host = host
        self._groups = {name: _ranks(group["ranks"]) for name, group in recorded["pg_config"].items()}
        self._entries: list[Mapping[str, Any]] = [_checked(entry) for entry in recorded.get("entries", [])]
        self.last = max((entry["time_created_ns"] / 1e9 for entry in self._entries), default=0.0)
        self.collectives: dict[str, int] = {}
        for entry in self._entries:
            if not entry["is_p2p"]:
                self.collectives[entry["process_group"][0]] = entry["collective_seq_id"]

    @cached_property
    def unfinished(self) -> list[Operation]:
        """The operations that were started and are not done.

        Those of a batch have no end of their own: it is that of the entry "coalesced", which comes behind them.
        """
        launches: dict[tuple[str, int, int], list[Mapping[str, Any]]] = {}
        for entry in self._entries:
            key = entry["process_group"][0], entry["collective_seq_id"], entry["p2p_seq_id"]
            launches.setdefault(key, []).append(entry)
        batches = [batch for batch in launches.values() if not _done(batch[-1])]
        parts = [entry for batch in batches for entry in (batch[:-1] or batch)]
        return [self._operation(entry) for entry in parts]

    def _operation(self, entry: Mapping[str, Any]) -> Operation:
        group, description = entry["process_group"]
        members = self._groups.get(group, ())
        name = entry["profiling_name"].partition(":")[2]
        ends = None
        if (message := _POINT_TO_POINT.fullmatch(name)) and len(members) > 1:
            name, own, peer = message["what"], members[int(message["self"])], members[int(message["peer"])]
            ends = (own, peer) if name == "send" else (peer, own)
        sequence = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        return Operation(group, description, name, sequence, members, ends, entry["time_created_ns"] / 1e9)

    def has_started(self, operation: Operation) -> bool:
        """Whether this rank has started an operation of another one. Of messages a pair's are done in order, so that
        one whose other end still waits for it is not done here either.
        """
        if operation.ends is None:
            return self.collectives.get(operation.group, -1) >= operation.sequence
        return any(o.group == operation.group and o.ends == operation.ends for o in self.unfinished)


Read = Callable[[int], Dump | None]
"""A rank's dump; None if it left none, or one that cannot be read."""


def find(folder: Path) -> Suspect | None:
    """The rank that the others wait for; None without dumps, or if none has anything to wait for.

    Reads, from the first rank that waits, only the dumps of the groups in which it waits, directly or through others.
    """
    paths = _dumps(folder)

    @cache
    def read(rank: int) -> Dump | None:
        return _read(paths[rank]) if rank in paths else None

    for first in sorted(paths):
        waits = _waits(first, paths, read)
        if any(waits.values()):
            return _suspect(waits, read)
    return None


def _waits(first: int, paths: Container[int], read: Read) -> dict[int, list[tuple[int, Operation]]]:
    """For a rank, and for those that it waits for: who it waits for, in which operation."""
    waits: dict[int, list[tuple[int, Operation]]] = {}
    ahead = [first]
    while ahead:
        rank = ahead.pop()
        if rank not in waits:
            dump = read(rank)
            started = dump.unfinished if dump else []
            waits[rank] = [(other, operation) for operation in started for other in _missing(operation, paths, read)]
            ahead += [other for other, _ in waits[rank]]
    return waits


def _missing(operation: Operation, paths: Container[int], read: Read) -> list[int]:
    """The ranks that have not started an operation. One whose dump cannot be read has the benefit of the doubt."""
    ranks = operation.ends or operation.members
    return [r for r in ranks if r not in paths or ((dump := read(r)) and not dump.has_started(operation))]


def _suspect(waits: Mapping[int, Sequence[tuple[int, Operation]]], read: Read) -> Suspect:
    """Of the ranks that are waited for: one without a dump, else one that waits for nobody, else the one that was the
    first to start nothing more.
    """
    awaited: dict[int, list[Operation]] = {}
    for others in waits.values():
        for other, operation in others:
            awaited.setdefault(other, []).append(operation)
    last = {rank: dump.last for rank in awaited if (dump := read(rank))}
    silent = [rank for rank in awaited if rank not in last]
    idle = [rank for rank in awaited if not waits[rank]]
    rank = min(silent or idle or awaited, key=lambda rank: (last.get(rank, 0.0), rank))
    operation = min(awaited[rank], key=lambda o: (o.since, o.group))
    waiting = [r for r in operation.ends or operation.members if (d := read(r)) and d.has_started(operation)]
    dump = read(rank)
    if dump:
        return Suspect(rank, dump.host, _said(operation, waiting))
    also = sorted(set(silent) - {rank})
    more = f", nor did {_listed(also)}" if also else ""
    return Suspect(rank, None, f"{_said(operation, waiting)}; it left no dump of its own{more}")


def _said(operation: Operation, waiting: Sequence[int]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(operation.since))
    group = f"group {operation.description}"
    if operation.ends is None:
        wait = f"{_listed(waiting)} wait" if len(waiting) > 1 else f"{_listed(waiting)} waits"
        return f"never joined {operation.name} {operation.sequence} of {group}, in which {wait} since {since}"
    if operation.name == "recv":
        return f"never sent the message of {group} for which rank {operation.ends[1]} waits since {since}"
    return f"never received the message of {group} that rank {operation.ends[0]} sends since {since}"


def _listed(ranks: Sequence[int]) -> str:
    few = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {few}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _done(entry: Mapping[str, Any]) -> bool:
    """gloo only retires what is done; NCCL also what has timed out."""
    return entry["state"] == "completed" or (entry["retired"] and entry["profiling_name"].startswith("gloo:"))


def _whole(value: object) -> bool:
    """Tell whether a value is a number of 64 bits, as the recorder's are."""
    return type(value) is int and -(2**63) <= value < 2**63


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "process_group": lambda value: len(value) == 2 and all(type(name) is str for name in value),
    "collective_seq_id": _whole,
    "p2p_seq_id": _whole,
    "time_created_ns": _whole,
    "profiling_name": lambda value: type(value) is str,
    "state": lambda value: type(value) is str,
    "retired": lambda value: type(value) is bool,
    "is_p2p": lambda value: type(value) is bool,
}
"""The fields that are read of an operation, each with a test of its type."""


def _checked(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """An operation as it was recorded. Raises: TypeError for a field of another type."""
    for name, fits in _FIELDS.items():
        if not fits(entry[name]):
            raise TypeError(f"{name} in a dump")
    return entry


def _ranks(given: str | Sequence[int]) -> tuple[int, ...]:
    """A group's ranks. Raises: TypeError for what is no list of whole numbers."""
    ranks = json.loads(given) if isinstance(given, str) else given
    if not all(_whole(rank) for rank in ranks):
        raise TypeError("ranks in a dump")
    return tuple(ranks)


def _dumps(folder: Path) -> dict[int, Path]:
    found = ((match, path) for path in folder.glob("*_rank_*") if (match := _NAME.fullmatch(path.name)))
    return {int(match["rank"]): path for match, path in found}


class _Plain(pickle.Unpickler):
    """Reads containers, numbers and strings; nothing that a pickle names is imported."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a dump")


def _read(path: Path) -> Dump | None:
    """A rank's dump; None, and a line on stderr, if it is none, or was not written to its end."""
    match = _NAME.fullmatch(path.name)
    try:
        if match is None or path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        with path.open("rb") as file:
            dump = Dump(match["host"], _Plain(file).load())
        dump.unfinished  # noqa: B018  so that whatever is wrong with it shows here
    except _BROKEN as error:
        why = f"{type(error).__name__}: {error}"[:200].replace("\n", " ")
        print(f"megascale: the flight record {path} cannot be read and is left out: {why}", file=sys.stderr)
        return None
    return dump


def main(folders: Sequence[str]) -> Iterator[str]:
    """Report on folders of dumps."""
    for folder in folders:
        yield f"{folder}: {find(Path(folder)) or 'no rank is known to wait for another'}"


if __name__ == "__main__":
    for line in main(sys.argv[1:]):
        print(line)
