"""Replication of in-memory copies between the writer processes of a job, over TCP.

Protocol for a copy, a file with a header beside it (`memory_checkpoints.py`):

    sender      one line of JSON: the job's secret, name and size of the file, header; then the bytes of the file
    receiver    one line: empty for success, or the error
"""

from __future__ import annotations

import hmac
import json
import mmap
import os
import re
import socket
import socketserver
import threading
from pathlib import Path
from typing import Any

from megascale.core.files import write_text

COPY_BLOCK_BYTES = 4 << 20
"""Bytes of a copy per checksum, and per read from the network."""

MAX_LINE_BYTES = 16 << 20
"""Longest first line in bytes."""

TIMEOUT = 60.0
"""Seconds without a byte until a peer is given up."""

_NAME = re.compile(r"rank-\d{5,}\.[ab]")


def send_replica(path: str, to: tuple[str, int], secret: str) -> None:
    """Send the copy at `path` and its header to a receiver's (host, port).

    Raises: OSError with the receiver's address if it does not have all of the copy
    """
    file = Path(path)
    header = json.loads(file.with_name(f"{file.name}.json").read_bytes())
    request = {"secret": secret, "name": file.name, "size": file.stat().st_size, "header": header}
    try:
        with socket.create_connection(to, TIMEOUT) as connection, open(file, "rb") as source:
            connection.sendall(json.dumps(request).encode() + b"\n")
            connection.sendfile(source)
            answer = connection.makefile("rb").readline().decode()
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), f"a copy to {to[0]}:{to[1]}") from None
    if answer != "\n":
        raise OSError(0, answer.strip() or "it hung up", f"a copy to {to[0]}:{to[1]}")


def serve_replicas(listener: int, folder: str, secret: str) -> None:
    """Receive copies into a folder from now on, in threads, at a listening socket."""

    class ReplicaHandler(socketserver.StreamRequestHandler):
        timeout = TIMEOUT

        def handle(self) -> None:
            try:
                request = json.loads(self.rfile.readline(MAX_LINE_BYTES))
                if not hmac.compare_digest(str(request["secret"]), secret):
                    return
                _receive(Path(folder), request, self.rfile)
                answer = ""
            except (OSError, ValueError, LookupError, TypeError) as error:
                answer = str(error).replace("\n", " ") or type(error).__name__
            self.wfile.write(answer.encode() + b"\n")

    server = socketserver.ThreadingTCPServer(("", 0), ReplicaHandler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=listener)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()


def _receive(folder: Path, request: dict[str, Any], source: Any) -> None:
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
                    count = source.readinto(block)
                if not count:
                    raise OSError(0, f"{size - done} of {size} bytes are missing")
                done += count
    finally:
        os.close(descriptor)
    write_text(header, json.dumps(request["header"]))
