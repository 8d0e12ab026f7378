"""A process of its own that writes what a rank has left in shared memory, while the rank trains on.

It imports no torch: it starts in a tenth of a second and takes a few megabytes. The first line of its standard input
is null, or a JSON object with the arguments of `copies.receive`; each that follows is an order, with those of `obey`.
It answers each order with a line on its standard output, and ends when its input does.
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

from megascale.checkpoint import copies
from megascale.checkpoint.shard import Entry, Shard
from megascale.checkpoint.storage import Location
from megascale.core.files import write_text
from megascale.core.process import die_with, stop_signals

NICE = 10
"""How far this process stands back behind those that compute."""

Place = tuple[str, str, list[int], int, int]
"""Key, format, shape, where its numbers begin in the memory, and how many bytes they are."""


def main(rank: int) -> None:
    """Serve until the process of this number goes, which is our parent: what it does not complete is worth nothing."""
    die_with(rank)
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)  # they are for the rank, which then waits for us
    os.nice(NICE)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a storage's library prints is no answer
    if receive := json.loads(sys.stdin.readline()):
        copies.receive(**receive)
    for line in sys.stdin:
        try:
            answer = obey(**json.loads(line))
        except OSError as error:
            answer = {"error": error.strerror or str(error), "what": error.filename}
        print(json.dumps(answer), file=answers, flush=True)


def obey(
    keep: dict[str, Any] | None = None,
    send: dict[str, Any] | None = None,
    write: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Carry out the parts of an order, one after the other, each with the arguments of the function of its name. What
    is to be written is written even if it cannot be kept.

    Raises: OSError, which names the file or the peer
    """
    answer: dict[str, Any] = {}
    if keep:
        with contextlib.suppress(OSError) if write else contextlib.nullcontext():
            keep_copy(**keep)
    if write:
        answer |= write_files(**write)
    if send:
        copies.send(**send)
    return answer


def keep_copy(memory: str, path: str, header: dict[str, Any]) -> None:
    """Sum up a memory, and put its header to its file's."""
    numbers = _numbers(memory)
    sums = [zlib.crc32(numbers[at : at + copies.BLOCK]) for at in range(0, len(numbers), copies.BLOCK)]
    try:
        write_text(Path(path), json.dumps(header | {"sums": sums}))
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def write_files(memory: str, folder: str, patience: float, chunk: int, files: dict[str, list[Place]]) -> dict[str, Any]:
    """Write parts of a memory as safetensors files in chunks of so many bytes. Returns of each file its size and
    checksum, and of each part, by its key, where it begins in its file and the checksums of its chunks.
    """
    found: dict[str, Any] = {"files": {}, "boxes": {}}
    numbers = _numbers(memory)
    for name, places in files.items():
        entries = [Entry(key, kind, shape, numbers[at : at + size]) for key, kind, shape, at, size in places]
        shard = Shard(entries, chunk)
        (Location(folder, patience) / name).write_parts(shard.parts)
        found["files"][name] = {"bytes": shard.size, "crc32": shard.crc32}
        found["boxes"] |= shard.boxes
    return found


def _numbers(memory: str) -> memoryview:
    with open(memory, "rb") as source:
        return memoryview(mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ))


if __name__ == "__main__":
    main(int(sys.argv[1]))
