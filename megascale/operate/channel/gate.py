"""A listening socket that admits only peers who know the job's secret.

A stranger costs a few hundred bytes of memory and a few seconds, and gets no answer. The gate is served by the selector
loop of its server.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megascale.operate.channel.handshake import HELLO_BYTES, PROOF_BYTES, ServerHandshake, Session

ADMISSION_S = 5.0  # seconds in which a new connection must prove that it knows the secret
MOST_STRANGERS = 256  # most connections without proof; another closes the oldest

Admit = Callable[[socket.socket, Session], None]
"""Function (connection, seals): take over an admitted, non-blocking connection."""

Refused = Callable[[int, str], None]
"""Function (refused so far, address): called for each stranger who sent something."""


@dataclass
class _Stranger:
    """A connection without proof of the secret yet."""

    connection: socket.socket
    address: str
    handshake: ServerHandshake
    deadline: float
    needed: int = HELLO_BYTES
    data: bytearray = field(default_factory=bytearray)


class Gate:
    """Admits connections at `listener` that prove to know `secret`. `purpose`: of the handshake, and for messages.
    `refused`: called for each stranger who sent something.

    The server's loop calls `key.data()` for each ready key of `selector`, and `expire` about once a second.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        secret: bytes,
        purpose: str,
        admit: Admit,
        refused: Refused = lambda count, address: None,
    ) -> None:
        self._listener = listener
        self._selector = selector
        self._new_handshake = functools.partial(ServerHandshake, secret, purpose)
        self._purpose = purpose
        self._admit = admit
        self._tell_refused = refused
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._refused = 0
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def expire(self) -> None:
        """Close connections that have not proved to know the secret in time."""
        now = time.monotonic()
        for stranger in list(self._strangers.values()):
            if stranger.deadline < now:
                self._refuse(stranger)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # it has gone again, or this process has no descriptor left
            if self._strangers:
                self._close(next(iter(self._strangers.values())))
            else:
                time.sleep(0.01)
            return
        if len(self._strangers) >= MOST_STRANGERS:
            self._refuse(next(iter(self._strangers.values())))
        connection.setblocking(False)
        name = f"{address[0]}:{address[1]}"
        stranger = _Stranger(connection, name, self._new_handshake(), time.monotonic() + ADMISSION_S)
        self._strangers[connection] = stranger
        self._selector.register(connection, selectors.EVENT_READ, functools.partial(self._read, stranger))

    def _read(self, stranger: _Stranger) -> None:
        try:
            part = stranger.connection.recv(stranger.needed - len(stranger.data))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        stranger.data += part
        if not part:
            self._refuse(stranger)
        elif len(stranger.data) == stranger.needed:
            self._judge(stranger)

    def _judge(self, stranger: _Stranger) -> None:
        """Answer a complete message of a stranger: a hello, then a proof."""
        message, stranger.data = bytes(stranger.data), bytearray()
        if stranger.needed == PROOF_BYTES:
            session = stranger.handshake.admit(message)
            if session is None:
                self._refuse(stranger, message)
                return
            del self._strangers[stranger.connection]
            self._selector.unregister(stranger.connection)
            stranger.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._admit(stranger.connection, session)
            return
        challenge = stranger.handshake.challenge(message)
        stranger.needed = PROOF_BYTES
        with contextlib.suppress(OSError):
            if challenge is not None and stranger.connection.send(challenge) == len(challenge):
                return
        self._refuse(stranger, message)

    def _refuse(self, stranger: _Stranger, message: bytes = b"") -> None:
        """Close a stranger's connection, and name one who sent something."""
        if message or stranger.data:
            self._refused += 1
            self._tell_refused(self._refused, stranger.address)
            print_refusal(self._refused, stranger.address, self._purpose)
        self._close(stranger)

    def _close(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection]
        self._selector.unregister(stranger.connection)
        stranger.connection.close()


def print_refusal(count: int, address: str, purpose: str) -> None:
    """Name a stranger who was refused on stderr: the first, and then ever fewer. `count`: of strangers so far."""
    if count in (1, 10, 100) or count % 1000 == 0:
        so_far = f" ({count} so far)" if count > 1 else ""
        text = f"a process at {address} without the job's secret was refused at the {purpose}{so_far}"
        with contextlib.suppress(OSError):
            print(f"megascale: {text}", file=sys.stderr, flush=True)
