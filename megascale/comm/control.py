"""Control data: small JSON values on which the ranks of a group agree outside of steps, through the job's store.

Nothing passes through the backend, so no communicator is made for it, and nothing is unpickled. The group's first rank
is in the middle: others append their values to one key, which it reads once, and all read the one value that it
publishes. Keys have the group's name, which opening of it and which call this is, so that no two calls can mix, and the
last reader deletes them.

One server thread, mostly rank 0's, answers everybody. A rank makes two requests to collect and about ten to receive
what is broadcast, of which it repeats one while it waits: a `gather` among 12,288 ranks is some 150,000 requests of ten
microseconds. Values are compressed; still a gather of n values of v bytes sends n * n * v, 15 GB of 100 random bytes
from 12,288 ranks. Values that are not alike are to be collected, and what follows from them broadcast; what is large
and for everybody goes through collectives (`totals.spread`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from megascale.comm.shared import host_key
from megascale.core.process import runs

PIECE = 4 << 20
"""Bytes of a request, at most: TCPStore refuses more than 8 MiB."""

COMPRESSED = 1 << 10
"""Bytes from which on a value is compressed."""

LOOKS = 0.2
"""Seconds after which a rank that waits looks whether others still live; more in groups of over 200 ranks, whose looks
the store must answer.
"""

ASKS = 1e-5
"""Seconds, times the group's ranks, after which the store is asked again at first; as a wait grows ever less often."""

NAMED = 16
"""Ranks that are looked after and named, of those that have not come."""

_Store = Any  # torch's type stubs lack half of what its stores have

_LOST = "control/lost"
_HEAD = struct.Struct("<IQ")  # a rank's index and the bytes that follow


class LostRankError(RuntimeError):
    """Other ranks have gone, or have not come in time."""


class Control:
    """Agreement within one group; this is rank `index` of `ranks`, their numbers in the job. All ranks make the same
    calls in the same order. Values are of JSON, and come back as JSON has them: tuples as lists. `what` names a call in
    errors.

    Raises: LostRankError on all that wait if a process of this host that is waited for has ended, if some rank has said
    that it leaves (`announce`), or after the store's timeout, with the ranks that have not come.
    """

    def __init__(self, name: str, ranks: Sequence[int], index: int) -> None:
        self._name = name
        self._ranks = ranks
        self._index = index
        self._size = len(ranks)
        self._calls = 0
        self._look = LOOKS * max(1.0, self._size / 200)

    def barrier(self, what: str) -> None:
        """Return when every rank has come here."""
        self.collect(None, what)
        self.broadcast(None, what)

    def gather(self, value: Any, what: str) -> list[Any]:
        """The value of each rank in order, on every rank. Small, and the more ranks, the more alike."""
        return self.broadcast(self.collect(value, what), what)

    def collect(self, value: Any, what: str) -> list[Any] | None:
        """The value of each rank in order, on the first rank; None on the others, which do not wait."""
        data = _encode(value)
        if self._size == 1:
            return [_decode(data)]
        call = self._next()
        values, count, full = f"{call}/values", f"{call}/count", f"{call}/full"
        if self._index:
            _append(self._store, values, data, _HEAD.pack(self._index, len(data)))
            if self._store.add(count, 1) == self._size - 1:
                self._store.set(full, "")
            return None
        self._wait(full, what, functools.partial(self._missing, values))
        found = _parts(self._store.get(values)) | {0: data}
        for key in (values, count, full):
            self._store.delete_key(key)
        return [_decode(found[index]) for index in range(self._size)]

    def broadcast(self, value: Any, what: str) -> Any:
        """The first rank's value, on every rank."""
        data = _encode(value) if self._index == 0 else b""
        if self._size == 1:
            return _decode(data)
        call = self._next()
        if self._index == 0:
            _publish(self._store, f"{call}/value", data)
            return _decode(data)
        self._wait(f"{call}/value", what, self._first)
        data, keys = _read(self._store, f"{call}/value")
        if self._store.add(f"{call}/read", 1) == self._size - 1:
            for key in (*keys, f"{call}/read"):
                self._store.delete_key(key)
        return _decode(data)

    def scatter(self, values: Sequence[Any] | None, what: str) -> Any:
        """To each rank its own of the first rank's values."""
        call = self._next()
        if self._index == 0:
            assert values is not None, "the first rank has one for each"
            for index in range(1, self._size):
                _publish(self._store, f"{call}/{index}", _encode(values[index]))
            return _decode(_encode(values[0]))
        self._wait(f"{call}/{self._index}", what, self._first)
        data, keys = _read(self._store, f"{call}/{self._index}")
        for key in keys:
            self._store.delete_key(key)
        return _decode(data)

    @functools.cached_property
    def _store(self) -> _Store:
        """The group's part of the job's store. Groups of one name and the same ranks may be opened again and again; all
        ranks open them in the same order.
        """
        job, own = _job(), self._ranks[self._index]
        group = f"control/{self._name}/{hashlib.sha256(repr(tuple(self._ranks)).encode()).hexdigest()[:16]}"
        job.set(_place(own), f"{os.getpid()} {host_key()}")
        return PrefixStore(f"{group}/{job.add(f'{group}/{own}', 1)}", job)

    def _next(self) -> int:
        self._calls += 1
        return self._calls

    def _wait(self, key: str, what: str, missing: Callable[[], list[int]]) -> None:
        """Until `key` is there; `missing` ranks are waited for."""
        start = looked = now = time.monotonic()
        while not self._store.check([key]):  # its own wait would write a warning whenever it ends without the key
            time.sleep(min(max(ASKS * self._size, (now - start) / 8), self._look))
            now = time.monotonic()
            if now - looked > self._look:
                self._check(what, missing(), now - start)
                looked = now

    def _check(self, what: str, missing: Sequence[int], waited: float) -> None:
        """Raise if waiting on is in vain. The first rank may come late itself, and then knows who is missing.

        The others wait twice as long, so that it can say so.
        """
        job = _job()
        if job.check([_LOST]):
            raise LostRankError(job.get(_LOST).decode())
        gone = [rank for rank in missing[:NAMED] if _has_ended(job, rank)]
        if gone:
            text = f"remote process exited: {_said(gone)} did not come to {what!r}"
        elif missing and waited > job.timeout.total_seconds() * (2 if self._index else 1):
            text = f"timed out waiting {waited:.0f} s for {_said(missing)} at {what!r}"
        else:
            return
        job.set(_LOST, text)
        raise LostRankError(text)

    def _missing(self, values: str) -> list[int]:
        there = _parts(self._store.get(values)) if self._store.check([values]) else {}
        return [rank for index, rank in enumerate(self._ranks) if index and index not in there]

    def _first(self) -> list[int]:
        return [self._ranks[0]]


def part() -> None:
    """Leave the job. The first rank, whose process may hold the store, stays until the others have."""
    if dist.get_world_size() > 1:
        Control("job", range(dist.get_world_size()), dist.get_rank()).collect(None, "the end of the job")


def announce(text: str) -> None:
    """Tell all ranks that wait in the store, or will, that this one leaves, and why."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        _job().set(_LOST, f"remote process exited: {text}")


def _job() -> _Store:
    return _get_default_store()


def _place(rank: int) -> str:
    return f"control/place/{rank}"


def _has_ended(job: _Store, rank: int) -> bool:
    """Tell whether a rank of this host is known to have ended."""
    if not job.check([_place(rank)]):
        return False
    pid, host = job.get(_place(rank)).decode().split(" ", 1)
    return host == host_key() and not runs(int(pid))


def _said(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:NAMED]))}{more}"


def _encode(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return zlib.compress(text, 1) if len(text) >= COMPRESSED else text


def _decode(data: bytes) -> Any:
    return json.loads(zlib.decompress(data) if data[:1] == b"x" else data)  # as zlib begins, and JSON never does


def _append(store: _Store, key: str, data: bytes, head: bytes = b"") -> None:
    """Append in pieces, each a request. Those of several ranks may come in between: with a `head` each begins anew."""
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        store.append(key, _HEAD.pack(_HEAD.unpack(head)[0], len(piece)) + piece if head else piece)


def _parts(data: bytes) -> dict[int, bytes]:
    """Split the values of several ranks, joined by `_append`, by index."""
    found: dict[int, bytearray] = defaultdict(bytearray)
    start = 0
    while start < len(data):
        index, size = _HEAD.unpack_from(data, start)
        start += _HEAD.size
        found[index] += data[start : start + size]
        start += size
    return {index: bytes(part) for index, part in found.items()}


def _publish(store: _Store, key: str, data: bytes) -> None:
    """Have `key` when all of the value is there; one that is too long for a request lies elsewhere."""
    if len(data) > PIECE:
        _append(store, f"{key}/long", data)
    store.set(key, data if len(data) <= PIECE else b"")


def _read(store: _Store, key: str) -> tuple[bytes, list[str]]:
    """Return a published value and the keys that hold it."""
    data = store.get(key)
    return (data, [key]) if data else (store.get(f"{key}/long"), [key, f"{key}/long"])
