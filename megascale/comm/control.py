"""The control channel: small JSON values that the ranks of a group exchange through the job's store, outside of steps.

- `ControlChannel`: barrier, gather, all-gather, broadcast and scatter within a group
- `leave_job`, `announce_exit`: the end of a rank, in order or with an error

Control data needs no communicator, and nothing is unpickled. The group's first rank is the root: the other ranks append
their values to a key, the root reads the key once and publishes a result, and all ranks read the result. A key contains
the group's name, the number of times the group was opened and the number of the call; the last reader deletes the key.

A single process, started by rank 0, answers all requests. A rank makes two requests to gather and about ten to receive
a broadcast; an all-gather among 12,288 ranks is about 150,000 requests of 45 us. Values are compressed, but an
all-gather of n values of v bytes sends n * n * v bytes: 15 GB for 12,288 ranks and 100 random bytes. Prefer gather, a
decision on the root, and broadcast where values differ, and `totals.broadcast_bytes` for large data.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from megascale.comm.host_ranks import host_key
from megascale.core.errors import LostPeerError
from megascale.core.process import process_exists
from megascale.core.rank import MAX_RANKS_NAMED, format_ranks
from megascale.core.wait_notice import WaitNotice
from megascale.record.label import Label
from megascale.record.layout import CONTROL
from megascale.record.log import RankLog

MAX_REQUEST_BYTES = 4 << 20  # most bytes of a request; longer values would delay the requests of other ranks
COMPRESS_FROM_BYTES = 1 << 10  # bytes from which a value is compressed

LIVENESS_CHECK_S = 0.2
"""Seconds between checks by a waiting rank for lost ranks; longer in groups of over 200 ranks, to spare the store."""

POLL_S_PER_RANK = 1e-5
"""First polling interval of a wait, in seconds per rank of the group. The interval grows with the wait."""

_Store = Any  # torch's type stubs lack half of what its stores have

ANSWER_S = 1.0  # seconds in which a rank that lost a peer hears of other ranks that did

_LOST_KEY = "control/lost"
_EXITED = "remote process exited: "
_HEAD = struct.Struct("<IQ")  # a rank's index, and the number of bytes that follow


class ControlChannel:
    """The control channel of a group, on rank `index` of its `ranks` (global ranks).

    All ranks make the same calls in the same order. Values are JSON: tuples come back as lists. `label` names a call in
    errors and in the `log`.

    Raises: LostPeerError on all waiting ranks, if the process of a missing rank on the same host has ended, if a rank
    has announced its exit (`announce_exit`), or after the store's timeout; the message names the missing ranks.
    """

    def __init__(self, name: str, ranks: Sequence[int], index: int, log: RankLog | None = None) -> None:
        self._name = name
        self._log = log or RankLog()
        self._log.open_group(name, ranks, CONTROL)
        self._ranks = ranks
        self._index = index
        self._size = len(ranks)
        self._calls = 0
        self._liveness_check_s = LIVENESS_CHECK_S * max(1.0, self._size / 200)

    def barrier(self, label: str) -> None:
        """Return when every rank has called."""
        self.gather(None, label)
        self.broadcast(None, label)

    def all_gather(self, value: Any, label: str) -> list[Any]:
        """Return every rank's value in rank order, on every rank. For small values; similar values in large groups."""
        return self.broadcast(self.gather(value, label), label)

    def gather(self, value: Any, label: str) -> list[Any] | None:
        """Return every rank's value in rank order on the first rank; None on the other ranks, which do not wait."""
        data = _encode(value)
        if self._size == 1:
            return [_decode(data)]
        call = self._next("gather", label)
        values, count, full = f"{call}/values", f"{call}/count", f"{call}/full"
        if self._index:
            _append(self._store, values, data, _HEAD.pack(self._index, len(data)))
            if self._store.add(count, 1) == self._size - 1:
                self._store.set(full, "")
            self._log.complete(self._call)
            return None
        self._wait(full, label, functools.partial(self._missing, values))
        by_index = _split_values(self._store.get(values)) | {0: data}
        for key in (values, count, full):
            self._store.delete_key(key)
        return [_decode(by_index[index]) for index in range(self._size)]

    def broadcast(self, value: Any, label: str) -> Any:
        """Return the first rank's value on every rank."""
        data = _encode(value) if self._index == 0 else b""
        if self._size == 1:
            return _decode(data)
        call = self._next("broadcast", label)
        if self._index == 0:
            _publish(self._store, f"{call}/value", data)
            self._log.complete(self._call)
            return _decode(data)
        self._wait(f"{call}/value", label, self._first)
        data, keys = _read(self._store, f"{call}/value")
        if self._store.add(f"{call}/read", 1) == self._size - 1:
            for key in (*keys, f"{call}/read"):
                self._store.delete_key(key)
        return _decode(data)

    def scatter(self, values: Sequence[Any] | None, label: str) -> Any:
        """Return `values[index]` of the first rank; the other ranks pass None."""
        call = self._next("scatter", label)
        if self._index == 0:
            assert values is not None, "scatter: the first rank passes a value for every rank, not None"
            for index in range(1, self._size):
                _publish(self._store, f"{call}/{index}", _encode(values[index]))
            self._log.complete(self._call)
            return _decode(_encode(values[0]))
        self._wait(f"{call}/{self._index}", label, self._first)
        data, keys = _read(self._store, f"{call}/{self._index}")
        for key in keys:
            self._store.delete_key(key)
        return _decode(data)

    @functools.cached_property
    def _store(self) -> _Store:
        """The group's part of the job's store. A group of the same name and ranks may be opened several times, in the
        same order on all ranks: the count is part of the prefix.
        """
        job, rank = _job(), self._ranks[self._index]
        group = f"control/{self._name}/{hashlib.sha256(repr(tuple(self._ranks)).encode()).hexdigest()[:16]}"
        job.set(_process_key(rank), f"{os.getpid()} {host_key()} {socket.gethostname()}")
        return PrefixStore(f"{group}/{job.add(f'{group}/{rank}', 1)}", job)

    def _next(self, operation: str, label: str) -> int:
        """Begin a call; return its number."""
        self._calls += 1
        self._call = self._log.enter(self._name, operation, Label(label), kind=CONTROL)
        self._log.issued(self._call)
        return self._calls

    def _wait(self, key: str, label: str, missing: Callable[[], list[int]]) -> None:
        """Wait until the store has `key`. `missing` returns the ranks that are waited for."""
        notice, checked = WaitNotice(f"rank {self._ranks[self._index]}"), 0.0
        self._log.begin_wait(self._call)
        while not self._store.check([key]):  # the store's own wait prints a warning at every timeout
            time.sleep(min(max(POLL_S_PER_RANK * self._size, notice.waited_s / 8), self._liveness_check_s))
            if notice.waited_s - checked > self._liveness_check_s:
                awaited = missing()
                self._check(label, awaited, notice.waited_s, lambda: [] if self._store.check([key]) else missing())
                # one line for a group: of its first rank, or of the second if the first is missing
                if awaited and self._index < 2:
                    notice.print_if_due(lambda ranks=awaited: f"{format_ranks(ranks)} at {label!r}")  # type: ignore[misc]
                checked = notice.waited_s
        self._log.complete(self._call)

    def _check(self, label: str, missing: Sequence[int], waited: float, look: Callable[[], list[int]]) -> None:
        """Raise if the wait cannot succeed. The other ranks wait twice as long as the first, because only the first
        rank knows the missing ranks, and may itself arrive late. `look`: returns the ranks that are missing now: one
        that has ended may have come before.
        """
        job = _job()
        if job.check([_LOST_KEY]):
            raise LostPeerError(job.get(_LOST_KEY).decode(), peers=missing)
        exited = [rank for rank in missing[:MAX_RANKS_NAMED] if _has_ended(job, rank)]
        exited = [rank for rank in exited if rank in look()] if exited else []
        if exited:
            text = f"remote process exited: {format_ranks(exited)} did not reach {label!r}"
        elif missing and waited > job.timeout.total_seconds() * (2 if self._index else 1):
            text = f"timed out waiting {waited:.0f} s for {format_ranks(missing)} at {label!r}"
        else:
            return
        job.set(_LOST_KEY, text)
        raise LostPeerError(text, peers=exited or missing)

    def _missing(self, values: str) -> list[int]:
        arrived = _split_values(self._store.get(values)) if self._store.check([values]) else {}
        return [rank for index, rank in enumerate(self._ranks) if index and index not in arrived]

    def _first(self) -> list[int]:
        return [self._ranks[0]]


def leave_job() -> None:
    """Leave the job. The first rank, whose process may host the store, waits until the other ranks have left."""
    if dist.get_world_size() > 1:
        ControlChannel("job", range(dist.get_world_size()), dist.get_rank()).gather(None, "the end of the job")


def announce_exit(text: str) -> None:
    """Tell all ranks that wait in the store, or will wait, that this rank exits, and why: the first to tell counts."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        _job().compare_set(_LOST_KEY, "", f"remote process exited: {text}")


def describe_lost(rank: int, peers: Sequence[int]) -> str:
    """Say what the store knows of the peers that `rank` has lost: "; rank 1 on node7 has ended without a word", and the
    error that was announced first. Waits up to ANSWER_S seconds for peers that have lost a peer themselves.
    """
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return ""
    job, start = _job(), time.monotonic()
    job.set(_lost_by_key(rank), "")
    silent = list(peers)[:MAX_RANKS_NAMED]
    while silent and time.monotonic() < start + ANSWER_S:
        time.sleep(ANSWER_S / 10)
        silent = [peer for peer in silent if not job.check([_lost_by_key(peer)])]
    ended = [peer for peer in silent if _has_ended(job, peer)]
    others = [peer for peer in silent if peer not in ended]
    places = (job.get(_process_key(peer)).decode() for peer in others if job.check([_process_key(peer)]))
    hosts = [place.split(" ")[2] for place in places]
    first = job.get(_LOST_KEY).decode() if job.check([_LOST_KEY]) else ""
    parts = [
        f"the process of {format_ranks(ended)} has ended" if ended else "",
        f"no answer from {format_ranks(others)} on {', '.join(dict.fromkeys(hosts))}" if others else "",
        f"the first to say so: {first.removeprefix(_EXITED)}" if first and f"rank {rank} of" not in first else "",
    ]
    return "".join(f"; {part}" for part in parts if part)


def _job() -> _Store:
    return _get_default_store()


def _process_key(rank: int) -> str:
    return f"control/place/{rank}"


def _lost_by_key(rank: int) -> str:
    return f"control/lost by/{rank}"


def _has_ended(job: _Store, rank: int) -> bool:
    """Return True if the rank ran on this host and its process has ended."""
    if not job.check([_process_key(rank)]):
        return False
    pid, host, _ = job.get(_process_key(rank)).decode().split(" ")
    return host == host_key() and not process_exists(int(pid))


def _encode(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return zlib.compress(text, 1) if len(text) >= COMPRESS_FROM_BYTES else text


def _decode(data: bytes) -> Any:
    return json.loads(zlib.decompress(data) if data[:1] == b"x" else data)  # zlib begins with "x", JSON never


def _append(store: _Store, key: str, data: bytes, head: bytes = b"") -> None:
    """Append in pieces of a request. With a `head` every piece gets one, because other ranks may append in between."""
    for start in range(0, len(data), MAX_REQUEST_BYTES):
        piece = data[start : start + MAX_REQUEST_BYTES]
        store.append(key, _HEAD.pack(_HEAD.unpack(head)[0], len(piece)) + piece if head else piece)


def _split_values(data: bytes) -> dict[int, bytes]:
    """Split the values of several ranks, as joined by `_append`: bytes by rank index."""
    by_index: dict[int, bytearray] = defaultdict(bytearray)
    start = 0
    while start < len(data):
        index, size = _HEAD.unpack_from(data, start)
        start += _HEAD.size
        by_index[index] += data[start : start + size]
        start += size
    return {index: bytes(part) for index, part in by_index.items()}


def _publish(store: _Store, key: str, data: bytes) -> None:
    """Set `key` once the whole value is in the store; a value too long for a request goes under a second key."""
    if len(data) > MAX_REQUEST_BYTES:
        _append(store, f"{key}/long", data)
    store.set(key, data if len(data) <= MAX_REQUEST_BYTES else b"")


def _read(store: _Store, key: str) -> tuple[bytes, list[str]]:
    """Return a published value and its keys."""
    data = store.get(key)
    return (data, [key]) if data else (store.get(f"{key}/long"), [key, f"{key}/long"])
