"""The process that keeps the job's store: keys and values in memory, for ranks that know the job's secret.

Rank 0 starts it (`comm.rendezvous`), and it ends with rank 0. It imports no torch. Protocol: the listening socket is
inherited, the secret comes on the standard input; then `channel.handshake`, and sealed `store_messages`.
"""

from __future__ import annotations

import functools
import heapq
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megascale.core.limits import raise_soft_limits
from megascale.core.process import die_with_parent, ignore_stops
from megascale.operate.channel.gate import Gate
from megascale.operate.channel.handshake import HEAD, NotAPeerError, Session
from megascale.operate.channel.store_messages import (
    MAX_MESSAGE_BYTES,
    OK,
    PURPOSE,
    REFUSED_KEY,
    TIMED_OUT,
    pack,
    unpack,
)

READ_BYTES = 1 << 16  # most bytes that are read from a connection at a time; Python allocates them for each read


@dataclass(eq=False)
class _Rank:
    """The connection of a rank. `is_full`: it takes no more at the moment. `missing`: keys that the rank waits for;
    `answer`: makes the answer once all are there; `waits`: number of waits so far.
    """

    connection: socket.socket
    session: Session
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    is_full: bool = False
    waits: int = 0
    missing: set[bytes] = field(default_factory=set)
    answer: Callable[[], list[bytes]] = list


class StoreServer:
    """Serve the store at `listener`, a listening socket, in `run`."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._values: dict[bytes, bytes | bytearray] = {}
        self._waiting: dict[bytes, set[_Rank]] = {}
        self._deadlines: list[tuple[float, int, int, _Rank]] = []  # a heap; the second item makes entries comparable
        self._entries = 0
        self._selector = selectors.DefaultSelector()
        self._gate = Gate(listener, self._selector, secret, PURPOSE, self._admit, self._note_refusal)

    def run(self, stop: int) -> None:
        """Serve until the descriptor `stop` ends."""
        self._selector.register(stop, selectors.EVENT_READ)
        next_expiry = 0.0
        while True:
            first = self._deadlines[0][0] if self._deadlines else float("inf")
            for key, _ in self._selector.select(max(0.0, min(1.0, first - time.monotonic()))):
                if key.data is None:
                    return
                key.data()
            now = time.monotonic()
            while self._deadlines and self._deadlines[0][0] <= now:
                _, _, wait, rank = heapq.heappop(self._deadlines)
                if rank.missing and rank.waits == wait:
                    self._end_wait(rank)
                    self._send(rank, [TIMED_OUT])
            if now > next_expiry:
                self._gate.expire()
                next_expiry = now + 1

    def _note_refusal(self, count: int, address: str) -> None:
        """Say in the store that strangers were refused, for rank 0, which may wait for a host with another secret."""
        times = "once" if count == 1 else f"{count} times"
        text = f"the store has refused a process without the job's secret {times}, last at {address}"
        self._store(REFUSED_KEY.encode(), text.encode())

    def _admit(self, connection: socket.socket, session: Session) -> None:
        rank = _Rank(connection, session)
        self._selector.register(connection, selectors.EVENT_READ, functools.partial(self._serve, rank))

    def _serve(self, rank: _Rank) -> None:
        """Send what is left to send, receive, and answer complete requests."""
        try:
            if rank.to_send:
                self._flush(rank)
            part = rank.connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._drop(rank)
            return
        data: bytes | bytearray = part
        if rank.received:
            rank.received += part
            data = rank.received
        done = 0
        try:
            while (content := self._next_message(rank, data, done)) is not None:
                done += HEAD.size + len(content)
                self._execute(rank, unpack(content))
        except (NotAPeerError, ValueError, LookupError, TypeError, struct.error) as error:
            print(f"megascale: the {PURPOSE} closes a rank's connection: {error!r}", file=sys.stderr, flush=True)
            self._drop(rank)
            return
        if data is part:
            rank.received += part[done:]
        else:
            del rank.received[:done]

    def _next_message(self, rank: _Rank, data: bytes | bytearray, start: int) -> bytes | None:
        """Return the content of the message that begins at `start`; None if it is not there yet to its end."""
        if len(data) < start + HEAD.size:
            return None
        size, tag = HEAD.unpack_from(data, start)
        if size > MAX_MESSAGE_BYTES:
            raise NotAPeerError(f"a message of {size} bytes is too long")
        end = start + HEAD.size + size
        if len(data) < end:
            return None
        content = bytes(data[start + HEAD.size : end])
        rank.session.received.check(tag, content)
        return content

    def _execute(self, rank: _Rank, request: list[bytes]) -> None:
        name, *arguments = request
        waits = name in (b"get", b"wait")
        if waits:
            timeout_ms, *keys = arguments
            answer = functools.partial(self._get, keys) if name == b"get" else list
            self._wait(rank, keys, int(timeout_ms) / 1000, answer)
        else:
            self._send(rank, [OK, *_OPERATIONS[name](self, *arguments)])

    def _get(self, keys: Sequence[bytes]) -> list[bytes]:
        return [bytes(self._values.get(key, b"")) for key in keys]  # one may be deleted while another is waited for

    def _set(self, *pairs: bytes) -> list[bytes]:
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            self._store(key, value)
        return []

    def _append(self, key: bytes, value: bytes) -> list[bytes]:
        """Append in place: a gather of all ranks appends thousands of times."""
        current = self._values.get(key, b"")
        if not isinstance(current, bytearray):
            current = bytearray(current)
        current += value
        self._store(key, current)
        return []

    def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        total = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
        self._store(key, total)
        return [total]

    def _compare_set(self, key: bytes, expected: bytes, value: bytes) -> list[bytes]:
        """As torch's stores: an absent key equals an empty value; the answer is the value that stands there then."""
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._store(key, value)
            return [value]
        return [expected if current is None else bytes(current)]

    def _check(self, *keys: bytes) -> list[bytes]:
        return [b"1" if all(key in self._values for key in keys) else b"0"]

    def _delete(self, key: bytes) -> list[bytes]:
        return [b"0" if self._values.pop(key, None) is None else b"1"]

    def _count(self) -> list[bytes]:
        return [b"%d" % len(self._values)]

    def _store(self, key: bytes, value: bytes | bytearray) -> None:
        """Store a value, and answer the ranks that waited for nothing else."""
        self._values[key] = value
        for rank in self._waiting.pop(key, ()):
            rank.missing.discard(key)
            if not rank.missing:
                self._send(rank, [OK, *rank.answer()])

    def _wait(self, rank: _Rank, keys: Sequence[bytes], timeout: float, answer: Callable[[], list[bytes]]) -> None:
        rank.missing = {key for key in keys if key not in self._values}
        if not rank.missing:
            self._send(rank, [OK, *answer()])
            return
        rank.answer = answer
        rank.waits += 1
        self._entries += 1
        for key in rank.missing:
            self._waiting.setdefault(key, set()).add(rank)
        heapq.heappush(self._deadlines, (time.monotonic() + timeout, self._entries, rank.waits, rank))

    def _end_wait(self, rank: _Rank) -> None:
        for key in rank.missing:
            others = self._waiting[key] - {rank}
            if others:
                self._waiting[key] = others
            else:
                del self._waiting[key]
        rank.missing = set()

    def _send(self, rank: _Rank, fields: list[bytes]) -> None:
        message = rank.session.sent.seal(pack(fields))
        if not rank.to_send:
            message = message[_send_some(rank.connection, message) :]
        if message:
            rank.to_send += message
            self._flush(rank)

    def _flush(self, rank: _Rank) -> None:
        """Send as much as the connection takes, and ask for a turn for the rest."""
        del rank.to_send[: _send_some(rank.connection, rank.to_send)]
        if rank.is_full != bool(rank.to_send):
            rank.is_full = bool(rank.to_send)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.is_full else 0)
            self._selector.modify(rank.connection, events, functools.partial(self._serve, rank))

    def _drop(self, rank: _Rank) -> None:
        self._end_wait(rank)
        self._selector.unregister(rank.connection)
        rank.connection.close()


def _send_some(connection: socket.socket, data: bytes | bytearray) -> int:
    """Send as much as the connection takes; return the number of bytes, all of them if the rank has gone."""
    try:
        return connection.send(data)
    except BlockingIOError:
        return 0
    except OSError:  # `_serve` will read the end
        return len(data)


_OPERATIONS: dict[bytes, Callable[..., list[bytes]]] = {
    b"set": StoreServer._set,
    b"append": StoreServer._append,
    b"add": StoreServer._add,
    b"compare_set": StoreServer._compare_set,
    b"check": StoreServer._check,
    b"delete": StoreServer._delete,
    b"count": StoreServer._count,
}


def main(descriptor: int, parent: int) -> None:
    """Serve the store at an inherited listening socket until the parent process ends."""
    die_with_parent(parent)
    ignore_stops()  # the ranks need the store to save and to leave
    raise_soft_limits()
    stop = sys.stdin.fileno()
    secret = bytes.fromhex(os.read(stop, 1 << 10).decode())
    StoreServer(socket.socket(fileno=descriptor), secret).run(stop)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
