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
import zlib
from pathlib import Path
from typing import IO, Any

from megascale.core.files import settle
from megascale.core.process import die_with, stop_signals

CHUNK = 16 << 20
"""Bytes that are summed up and written at once."""

NICE = 10
"""How far this process stands back behind those that compute."""

Entry = tuple[str, str, list[int], int, int]
"""Key, format, shape, where its numbers begin in the memory, and how many bytes they are."""


def main(rank: int) -> None:
    """Serve until the process of this number goes, which is our parent: what it does not complete is worth nothing."""
    die_with(rank)
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)  # they are for the rank, which then waits for us
    os.nice(NICE)
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"crc32": write(**json.loads(line))}
        except OSError as error:
            answer = {"error": error.strerror or str(error), "path": error.filename}
        print(json.dumps(answer), flush=True)


def write(memory: str, path: str, entries: list[Entry]) -> dict[str, int]:
    """Write parts of a memory as a safetensors file. Returns the CRC-32 of each, by its key.

    Raises: OSError, which names the file
    """
    try:
        with (
            open(memory, "rb") as source,
            mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as numbers,
            open(path, "xb") as file,
        ):
            file.write(_header(entries))
            sums = {key: _copy(numbers, start, size, file) for key, _, _, start, size in entries}
        settle(Path(path))
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    return sums


def _header(entries: list[Entry]) -> bytes:
    """Eight bytes with the length of what follows, and in JSON what the file holds."""
    header, place = {}, 0
    for key, kind, shape, _, size in entries:
        header[key] = {"dtype": kind, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _copy(numbers: mmap.mmap, start: int, size: int, file: IO[bytes]) -> int:
    """Copy a part of the memory. Returns its checksum."""
    crc = 0
    with memoryview(numbers) as whole:
        for at in range(start, start + size, CHUNK):
            with whole[at : min(at + CHUNK, start + size)] as part:
                crc = zlib.crc32(part, crc)
                file.write(part)
    return crc


if __name__ == "__main__":
    main(int(sys.argv[1]))
