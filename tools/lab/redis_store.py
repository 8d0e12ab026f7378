"""A Redis server on this host and a client of it with the calls of a store, to compare the job's store with.

Requests and answers are those of Redis' protocol (RESP 2), over a plain socket: no library stands between.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

from megascale.core.errors import MegascaleError
from megascale.core.network import LOOPBACK, listen

PROGRAM = "redis-server"

START_S = 10.0
"""Seconds for a server to answer."""


def has_redis() -> bool:
    """Return whether this host has a Redis server installed."""
    return shutil.which(PROGRAM) is not None


class RedisStore:
    """A connection to a Redis server, which answers one request after the other.

    Raises: OSError for a lost connection; MegascaleError for an error that the server sends
    """

    def __init__(self, port: int):
        self._socket = socket.create_connection((LOOPBACK, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")

    def set(self, key: str, value: bytes) -> None:
        self._call(b"SET", key.encode(), value)

    def get(self, key: str) -> bytes | None:
        return self._call(b"GET", key.encode())

    def add(self, key: str, amount: int) -> int:
        return int(self._call(b"INCRBY", key.encode(), b"%d" % amount) or b"0")

    def check(self, keys: list[str]) -> bool:
        """Return whether all of the keys are set."""
        return self._call(b"EXISTS", *(key.encode() for key in keys)) == b"%d" % len(keys)

    def _call(self, *words: bytes) -> bytes | None:
        self._socket.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words))
        head = self._answers.readline().rstrip()
        if head[:1] != b"$":
            if head[:1] not in (b"+", b":"):
                raise MegascaleError(f"Redis answers {head.decode(errors='replace')!r}", hint="is it still running?")
            return head[1:]
        size = int(head[1:])
        return None if size < 0 else self._answers.read(size + 2)[:-2]


@contextlib.contextmanager
def redis_store() -> Iterator[tuple[Callable[[], RedisStore], int]]:
    """Serve an empty Redis that writes no files; yield what opens a connection, and the server's process ID.

    Raises: MegascaleError if it does not answer
    """
    with listen(LOOPBACK) as listener:
        port = listener.getsockname()[1]  # free again when Redis binds it
    with tempfile.TemporaryDirectory() as folder:
        words = ["--bind", LOOPBACK, "--port", str(port), "--save", "", "--maxclients", "20000", "--dir", folder]
        server = subprocess.Popen([PROGRAM, *words], stdout=subprocess.DEVNULL)
        try:
            _wait(server, port)
            yield lambda: RedisStore(port), server.pid
        finally:
            server.kill()
            server.wait()


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + START_S
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((LOOPBACK, port)):
            return
        if server.poll() is not None or time.monotonic() > end:
            raise MegascaleError(f"{PROGRAM} does not start", hint=f"try: {PROGRAM} --bind {LOOPBACK} --port {port}")
        time.sleep(0.01)
