"""A process of its own that writes what a rank has left in shared memory, while the rank trains on.

It imports no torch: it starts in a tenth of a second and takes a few megabytes. Each line of its standard input is an
order, a JSON object with the arguments of `write`; it answers each with a line on its standard output, and ends when
its input does.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
from typing import Any

from megascale.checkpoint.shard import Entry, Shard
from megascale.checkpoint.storage import Location
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
    for line in sys.stdin:
        try:
            answer = write(**json.loads(line))
        except OSError as error:
            answer = {"error": error.strerror or str(error), "path": error.filename}
        print(json.dumps(answer), flush=True)


def write(memory: str, folder: str, patience: float, files: dict[str, list[Place]]) -> dict[str, Any]:
    """Write parts of a memory as safetensors files. Returns of each file its size and checksum, and of each part, by
    its key, where it begins in its file and the checksums of its chunks.

    Raises: OSError, which names the file
    """
    found: dict[str, Any] = {"files": {}, "boxes": {}}
    with open(memory, "rb") as source:
        numbers = memoryview(mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ))
    for name, places in files.items():
        shard = Shard([Entry(key, kind, shape, numbers[at : at + size]) for key, kind, shape, at, size in places])
        (Location(folder, patience) / name).write_parts(shard.parts)
        found["files"][name] = {"bytes": shard.size, "crc32": shard.crc32}
        found["boxes"] |= shard.boxes
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
