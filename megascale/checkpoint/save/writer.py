"""The writer process: stores a rank's snapshot from shared memory while the rank trains on.

The process imports no torch: it starts in a tenth of a second and takes a few megabytes. Protocol, in lines of JSON:

    stdin    first line: null, or the arguments of `replication.serve_replicas`; then orders, the arguments of `execute`
    stdout   one answer for every order

The process ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

from megascale.checkpoint.format.safetensors_file import SafetensorsFile, TensorEntry
from megascale.checkpoint.memory import replication
from megascale.checkpoint.storage import Location
from megascale.core.files import write_text
from megascale.core.process import die_with_parent, stop_signals

NICE = 10
"""Niceness: computing processes go first."""

StoredEntry = tuple[str, str, list[int], int, int]
"""Key, dtype, shape, byte offset in the snapshot, and bytes."""


def main(parent_pid: int) -> None:
    """Serve orders until the parent process exits; without the parent an unfinished checkpoint is useless."""
    die_with_parent(parent_pid)
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)  # the rank handles these, and then waits for its writer
    os.nice(NICE)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a storage library's prints must not mix with the answers
    if receiver_args := json.loads(sys.stdin.readline()):
        replication.serve_replicas(**receiver_args)
    for line in sys.stdin:
        try:
            answer = execute(**json.loads(line))
        except OSError as error:
            to_host = isinstance(error, replication.ReplicationError)
            answer = {"error": error.strerror or str(error), "what": error.filename, "to_host": to_host}
        print(json.dumps(answer), file=answers, flush=True)


def execute(
    keep: dict[str, Any] | None = None,
    send: dict[str, Any] | None = None,
    write: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Execute an order: `write_copy_header(**keep)`, `write_files(**write)` and `send_replica(**send)`, if given.

    Files are written even if the in-memory copy fails.

    Raises: OSError with the file or the peer
    """
    answer: dict[str, Any] = {}
    if keep:
        with contextlib.suppress(OSError) if write else contextlib.nullcontext():
            write_copy_header(**keep)
    if write:
        answer |= write_files(**write)
    if send:
        replication.send_replica(**send)
    return answer


def write_copy_header(memory: str, path: str, header: dict[str, Any]) -> None:
    """Write the header of an in-memory copy to `path`, with the CRC-32 of every block of the copy."""
    data = _map_memory(memory)
    sums = [
        zlib.crc32(data[at : at + replication.COPY_BLOCK_BYTES])
        for at in range(0, len(data), replication.COPY_BLOCK_BYTES)
    ]
    try:
        write_text(Path(path), json.dumps(header | {"sums": sums}))
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def write_files(
    memory: str, folder: str, retry_s: float, chunk: int, files: dict[str, list[StoredEntry]]
) -> dict[str, Any]:
    """Write parts of a snapshot as safetensors files with a checksum for every `chunk` bytes.

    Returns `files`, size and CRC-32 by file name, and `boxes`, first byte and chunk checksums by key.
    """
    written: dict[str, Any] = {"files": {}, "boxes": {}}
    data = _map_memory(memory)
    for name, stored in files.items():
        entries = [TensorEntry(key, dtype, shape, data[at : at + size]) for key, dtype, shape, at, size in stored]
        file = SafetensorsFile(entries, chunk)
        (Location(folder, retry_s) / name).write_chunks(file.iter_bytes)
        written["files"][name] = {"bytes": file.size, "crc32": file.crc32}
        written["boxes"] |= file.boxes
    return written


def _map_memory(memory: str) -> memoryview:
    with open(memory, "rb") as source:
        return memoryview(mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ))


if __name__ == "__main__":
    main(int(sys.argv[1]))
