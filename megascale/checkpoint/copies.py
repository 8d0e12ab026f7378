"""Copies of memory that travel between the writers of a job, from host to host.

A copy is a file and its header (`checkpoint.memory`). One line of JSON says the job's secret, the file's name and size,
and the header; then come the file's bytes, and one line is the answer, empty if all is well.
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

BLOCK = 4 << 20
"""Bytes of a copy that have a checksum together, and that are taken from the network at once."""

LINE = 16 << 20
"""Bytes that a first line may have."""

TIMEOUT = 60.0
"""Seconds without a byte after which a peer is given up."""

_NAME = re.compile(r"rank-\d{5,}\.[ab]")


def send(path: str, to: tuple[str, int], secret: str) -> None:
    """Send a copy, which lies in `path`, with its header beside it.

    Raises: OSError, which says to whom, if the other does not have all of it
    """
    file = Path(path)
    header = json.loads(file.with_name(f"{file.name}.json").read_bytes())
    said = {"secret": secret, "name": file.name, "size": file.stat().st_size, "header": header}
    try:
        with socket.create_connection(to, TIMEOUT) as connection, open(file, "rb") as source:
            connection.sendall(json.dumps(said).encode() + b"\n")
            connection.sendfile(source)
            answer = connection.makefile("rb").readline().decode()
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), f"a copy to {to[0]}:{to[1]}") from None
    if answer != "\n":
        raise OSError(0, answer.strip() or "it hung up", f"a copy to {to[0]}:{to[1]}")


def receive(listener: int, folder: str, secret: str) -> None:
    """Take copies into a folder from now on, in threads, from a socket that listens."""

    class Taking(socketserver.StreamRequestHandler):
        timeout = TIMEOUT

        def handle(self) -> None:
            try:
                said = json.loads(self.rfile.readline(LINE))
                if not hmac.compare_digest(str(said["secret"]), secret):
                    return
                _take(Path(folder), said, self.rfile)
                answer = ""
            except (OSError, ValueError, LookupError, TypeError) as error:
                answer = str(error).replace("\n", " ") or type(error).__name__
            self.wfile.write(answer.encode() + b"\n")

    server = socketserver.ThreadingTCPServer(("", 0), Taking, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=listener)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()


def _take(folder: Path, said: dict[str, Any], source: Any) -> None:
    """Fill the file that is there, if one is: who owns it has it in its memory."""
    name, size = str(said["name"]), int(said["size"])
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
        with mmap.mmap(descriptor, size) as memory, memoryview(memory) as room:
            done = 0
            while done < size:
                with room[done : done + BLOCK] as block:
                    count = source.readinto(block)
                if not count:
                    raise OSError(0, f"{size - done} of {size} bytes are missing")
                done += count
    finally:
        os.close(descriptor)
    write_text(header, json.dumps(said["header"]))
