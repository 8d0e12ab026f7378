"""Replication of in-memory copies between the writer processes of a job, over TCP.

Protocol for a copy, a file with a header beside it (`copies.py`), after the handshake of `channel.handshake`:

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

from megascale.core.files import write_text
from megascale.core.limits import raise_soft_limits
from megascale.core.network import join_port, listen
from megascale.operate.channel import handshake
from megascale.operate.channel.gate import Gate
from megascale.operate.channel.handshake import Session

COPY_BLOCK_BYTES = 4 << 20  # bytes of a copy's checksum block, and of a read from the network
MAX_REQUEST_BYTES = 16 << 20  # most bytes of a request, all of them but the copy's own

TIMEOUT_S = 60.0
"""Seconds until a peer is given up, such as a writer that starts as the run resumes: for the connection and the
handshake in all, then without a byte.
"""

SAVE_TIMEOUT_S = 3.0  # as TIMEOUT_S in a save, for which training may wait
PURPOSE = "receiver of copies"  # the purpose of the handshake

_NAME = re.compile(r"rank-\d{5,}\.[ab]")


class ReplicationError(OSError):
    """A copy has not arrived at another host; `filename` says at which."""


def send_replica(path: str, peer: str, address: tuple[str, int], secret: str, timeout_s: float) -> None:
    """Send the copy at `path` and its header to `peer`, which receives at `address`. `secret`: the job's, in
    hexadecimal; `timeout_s`: seconds until the peer is given up, as TIMEOUT_S.

    Raises: ReplicationError if the receiver does not have all of the copy
    """
    host, port = address
    file = Path(path)
    header = json.loads(file.with_name(f"{file.name}.json").read_bytes())
    request = {"name": file.name, "size": file.stat().st_size, "header": header}
    try:
        connection, session = handshake.connect((host, port), bytes.fromhex(secret), PURPOSE, timeout_s)
        with connection, open(file, "rb") as source:
            connection.settimeout(timeout_s)
            connection.sendall(session.sent.seal(json.dumps(request).encode()))
            connection.sendfile(source)
            response = handshake.receive_message(connection, session, MAX_REQUEST_BYTES).decode()
    except TimeoutError:
        response = f"no answer for {timeout_s:g} s"
    except OSError as error:
        response = error.strerror or str(error)
    except EOFError:
        response = "it hung up"
    if response:
        raise ReplicationError(0, response, f"a copy to {peer} at {join_port(host, port)}")


def serve_replicas(address: tuple[str, int], folder: str, secret: str) -> None:
    """Receive copies into a folder from now on, in threads, from peers that know `secret`. `address`: host and port,
    which the rank keeps (`core.network.reserve_port`). Only this process listens there: when it has ended, peers are
    refused, which try again until their timeout (`send_replica`).
    """
    raise_soft_limits()

    def admit(connection: socket.socket, session: Session) -> None:
        """Give a peer a thread: a rank sends to one receiver at a time, and is sent to by few ranks."""
        threading.Thread(target=_receive_copy, args=(connection, session, Path(folder)), daemon=True).start()

    def serve() -> None:
        selector = selectors.DefaultSelector()
        gate = Gate(listen(*address, shared=True), selector, bytes.fromhex(secret), PURPOSE, admit)
        while True:
            for key, _ in selector.select(1.0):
                key.data()
            gate.expire()

    threading.Thread(target=serve, daemon=True).start()


def _receive_copy(connection: socket.socket, session: Session, folder: Path) -> None:
    """Receive a copy and send the response, none to a sender that has hung up."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(TIMEOUT_S)
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
    """Receive a copy in place: its rank may have the file mapped. Its memory is allocated block by block,
    because all of it may take longer than a sender waits.
    """
    name, size = str(request["name"]), int(request["size"])
    if not _NAME.fullmatch(name) or size < 1:
        raise ValueError(f"{name!r} of {size} bytes is no copy")
    header = folder / f"{name}.json"
    header.unlink(missing_ok=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as memory, memoryview(memory) as buffer:
            done = allocated = 0
            while done < size:
                if done == allocated:
                    allocated = min(allocated + COPY_BLOCK_BYTES, size)
                    os.posix_fallocate(descriptor, done, allocated - done)
                with buffer[done:allocated] as block:
                    count = source.recv_into(block)
                if not count:
                    raise OSError(0, f"{size - done} of {size} bytes are missing")
                done += count
    finally:
        os.close(descriptor)
    write_text(header, json.dumps(request["header"]))
