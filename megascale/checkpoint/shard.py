"""A safetensors file that is formed as it is written, and whose checksums are known when it is."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megascale.checkpoint import crc

CHUNK = 256 << 10
"""Bytes of a tensor that have a checksum together, at least: what a reader must read to know that a part of them is
right.
"""

SUMS = 1 << 20
"""Chunks of a checkpoint, about, above which they are larger: a manifest has a number for each."""


def chunk_of(size: int) -> int:
    """Bytes of a chunk, a power of two, in a checkpoint of so many bytes."""
    return max(CHUNK, 1 << (size // SUMS).bit_length())


@dataclass(frozen=True)
class Entry:
    """A tensor by its key: its format as safetensors names it, its shape, and its numbers, bytes in row-major order."""

    key: str
    format: str
    shape: Sequence[int]
    data: memoryview


@dataclass
class Shard:
    """A file of `entries` in chunks of so many bytes. When all of `parts` has been taken, `size` in bytes and `crc32`
    are the file's, and `boxes` says of each entry, by its key, where it begins and the CRC-32 of each of its chunks.
    """

    entries: Sequence[Entry]
    chunk: int
    size: int = 0
    crc32: int = 0
    boxes: dict[str, tuple[int, list[int]]] = field(default_factory=dict)

    def parts(self) -> Iterator[bytes | memoryview]:
        """Its bytes, from the beginning."""
        header = self._header()
        self.size, self.crc32, self.boxes = len(header), zlib.crc32(header), {}
        yield header
        for entry in self.entries:
            sums: list[int] = []
            self.boxes[entry.key] = self.size, sums
            for at in range(0, len(entry.data), self.chunk):
                part = entry.data[at : at + self.chunk]
                sums.append(zlib.crc32(part))
                self.crc32 = crc.joined(self.crc32, sums[-1], len(part))
                self.size += len(part)
                yield part

    def _header(self) -> bytes:
        """Eight bytes with the length of what follows, and in JSON what the file holds."""
        header, place = {}, 0
        for entry in self.entries:
            end = place + len(entry.data)
            header[entry.key] = {"dtype": entry.format, "shape": entry.shape, "data_offsets": [place, end]}
            place = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text
