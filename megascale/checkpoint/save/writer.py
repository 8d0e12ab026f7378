"""The writer process: stores a rank's snapshot from shared memory while the rank trains on.

The process imports no torch: it starts in a tenth of a second and takes a few megabytes. Protocol, in lines of JSON:

    stdin    first line: null, or the arguments of `replication.serve_replicas`; then requests
    stdout   one response for every request

The process ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megascale.checkpoint.format.safetensors_file import SafetensorsFile
from megascale.checkpoint.memory import replication
from megascale.core.files import write_text
from megascale.core.process import die_with_parent, ignore_stops
from megascale.core.storage import Location

NICE = 10  # niceness: training processes have priority


def main(parent_pid: int) -> None:
    """Serve requests until the parent process exits; without the parent an unfinished checkpoint is useless."""
    die_with_parent(parent_pid)
    ignore_stops()  # the rank handles them, and then waits for its writer
    os.nice(NICE)
    responses = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a storage library's prints must not mix with the responses
    if receiver_args := json.loads(sys.stdin.readline()):
        replication.serve_replicas(**receiver_args)
    for line in sys.stdin:
        try:
            response = execute(json.loads(line))
        except OSError as error:
            is_replication = isinstance(error, replication.ReplicationError)
            response = {"error": error.strerror or str(error), "path": error.filename, "replication": is_replication}
        print(json.dumps(response), file=responses, flush=True)


def execute(request: Mapping[str, Any]) -> dict[str, Any]:
    """Call the functions that a request names, with the arguments in the request; return their response.

    A request has up to three keys: `write_copy_header`, `write_files`, `send_replica`. Files are written even if the
    header of the in-memory copy cannot be written.

    Raises: OSError with the file or the peer
    """
    response: dict[str, Any] = {}
    if arguments := request.get("write_copy_header"):
        with contextlib.suppress(OSError) if "write_files" in request else contextlib.nullcontext():
            write_copy_header(**arguments)
    if arguments := request.get("write_files"):
        response |= write_files(**arguments)
    if arguments := request.get("send_replica"):
        replication.send_replica(**arguments)
    return response


def write_copy_header(snapshot_path: str, path: str, header: dict[str, Any]) -> None:
    """Write the header of an in-memory copy to `path`, with the CRC-32 of every checksum block of the copy."""
    data = _map_snapshot(snapshot_path)
    sums = [
        zlib.crc32(data[at : at + replication.COPY_BLOCK_BYTES])
        for at in range(0, len(data), replication.COPY_BLOCK_BYTES)
    ]
    try:
        write_text(Path(path), json.dumps(header | {"sums": sums}))
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def write_files(
    snapshot_path: str,
    folder: str,
    retry_s: float,
    checksum_block_bytes: int,
    files: dict[str, list[tuple[str, str, list[int], int, int]]],
) -> dict[str, Any]:
    """Write the tensor shards in a snapshot as safetensors files with a checksum for every `checksum_block_bytes`.
    `files`: for each shard key, dtype, shape, byte offset in the snapshot and size in bytes.

    Returns `files`, size and CRC-32 by file name, and `locations`, as of `SafetensorsFile`.
    """
    written: dict[str, Any] = {"files": {}, "locations": {}}
    data = _map_snapshot(snapshot_path)
    for name, stored in files.items():
        entries = [(key, dtype, shape, data[at : at + size]) for key, dtype, shape, at, size in stored]
        file = SafetensorsFile(name, entries, checksum_block_bytes)
        (Location(folder, retry_s) / name).write_chunks(file.iter_bytes)
        written["files"][name] = {"bytes": file.size, "crc32": file.crc32}
        written["locations"] |= file.locations
    return written


def _map_snapshot(path: str) -> memoryview:
    with open(path, "rb") as source:
        return memoryview(mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ))


if __name__ == "__main__":
    main(int(sys.argv[1]))
