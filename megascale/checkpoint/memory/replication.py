"""Replication of in-memory copies between the writer processes of a job, over TCP.

Protocol for a copy, a file with a header beside it (`copies.py`), after the handshake of `core.handshake`:

    sender      a sealed message of JSON: name and size of the file, header; then the bytes of the file
    receiver    a sealed message: empty for success, or the error

The bytes are neither sealed nor encrypted; a resume compares them with the header's checksums.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import selectors
import socket
import threading
from pathlib import Path
from typing import Any

from megascale.core import handshake
from megascale.core.files import write_text
from megascale.core.gate import Gate, raise_descriptor_limit
from megascale.core.handshake import Session

COPY_BLOCK_BYTES = 4 << 20
"""Bytes of a copy's checksum block, and of a read from the network."""

MAX_REQUEST_BYTES = 16 << 20
"""Most bytes of a request, all of them but the copy's own."""

TIMEOUT = 60.0
"""Seconds without a byte until a peer is given up."""

PURPOSE = "receiver of copies"
"""The purpose of the handshake."""

_NAME = re.compile(r"rank-\d{5,}\.[ab]")


class ReplicationError(OSError):
    """A copy has not arrived at another host; `filename` has its address."""


def send_replica(path: str, to: tuple[str, int], secret: str) -> None:
    """Send the copy at `path` and its header to a receiver's (host, port). `secret`: the job's, in hexadecimal.

    Raises: ReplicationError if the receiver does not have all of the copy
    """
    file = Path(path)
    header = json.loads(file.with_name(f"{file.name}.json").read_bytes())
    request = {"name": file.name, "size": file.stat().st_size, "header": header}
    try:
        connection, session = handshake.connect((to[0], to[1]), bytes.fromhex(secret), PURPOSE, TIMEOUT)
        with connection, open(file, "rb") as source:
            connection.settimeout(TIMEOUT)
            connection.sendall(session.sent.seal(json.dumps(request).encode()))
            connection.sendfile(source)
            response = handshake.receive_message(connection, session, MAX_REQUEST_BYTES).decode()
    except (OSError, EOFError) as error:
        number, text = (error.errno or 0, error.strerror) if isinstance(error, OSError) else (0, "it hung up")
        raise ReplicationError(number, text or str(error), f"a copy to {to[0]}:{to[1]}") from None
    if response:
        raise ReplicationError(0, response, f"a copy to {to[0]}:{to[1]}")


def serve_replicas(listener: int, folder: str, secret: str) -> None:
    """Receive copies into a folder from now on, in threads, at a listening socket, from peers that know `secret`."""
    raise_descriptor_limit()
    threading.Thread(target=_serve, args=(listener, Path(folder), bytes.fromhex(secret)), daemon=True).start()


def _serve(listener: int, folder: Path, secret: bytes) -> None:
    """Admit peers. Each gets a thread: a rank sends to one receiver at a time, and is sent to by few ranks."""

    def admit(connection: socket.socket, session: Session) -> None:
        threading.Thread(target=_receive_copy, args=(connection, session, folder), daemon=True).start()

    selector = selectors.DefaultSelector()
    gate = Gate(socket.socket(fileno=listener), selector, secret, PURPOSE, admit)
    while True:
        for key, _ in selector.select(1.0):
            key.data()
        gate.expire()


def _receive_copy(connection: socket.socket, session: Session, folder: Path) -> None:
    """Receive a copy and send the response, none to a sender that has hung up."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(TIMEOUT)
        try:
            request = json.loads(handshake.receive_message(connection, session, MAX_REQUEST_BYTES))
            _receive(folder, request, connection)
            response = ""
        except OSError as error:
            response = error.strerror or str(error)
        except (EOFError, ValueError, LookupError, TypeError) as error:
            response = f"no copy: {error}"
        connection.sendall(session.sent.seal(response.encode()))


def _receive(folder: Path, request: dict[str, Any], source: socket.socket) -> None:
    """Receive a copy in place: its rank may have the file mapped."""
    name, size = str(request["name"]), int(request["size"])
    if not _NAME.fullmatch(name) or size < 1:
        raise ValueError(f"{name!r} of {size} bytes is no copy")
    header = folder / f"{name}.json"
    header.unlink(missing_ok=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, size)
        with mmap.mmap(descriptor, size) as memory, memoryview(memory) as buffer:
            done = 0
            while done < size:
                with buffer[done : done + COPY_BLOCK_BYTES] as block:
                    count = source.recv_into(block)
                if not count:
                    raise OSError(0, f"{size - done} of {size} bytes are missing")
                done += count
    finally:
        os.close(descriptor)
    write_text(header, json.dumps(request["header"]))
