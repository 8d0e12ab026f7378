"""A safetensors file as a stream of bytes, with a CRC-32 of the file and of every block of its tensors."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megascale.checkpoint.format import crc

MIN_CHECKSUM_BLOCK_BYTES = 256 << 10
"""Smallest checksum block. A reader of a part of a tensor reads and checks whole blocks."""

HEADER_BYTES = 4 << 10
"""Upper bound of the header of a file with one shard."""

MAX_SHARD_BYTES = 64 << 20
"""Largest stored shard, except for a larger row: the memory that a reader needs beside its state."""

MAX_READ_BYTES = 64 << 20
"""Largest read, except for a larger shard."""

MAX_CHECKSUMS = 1 << 20
"""Approximate limit of checksums in a manifest: a larger checkpoint has larger blocks."""


def checksum_block_bytes(size: int) -> int:
    """Return the size of a checksum block in bytes, a power of two, for a checkpoint of `size` bytes."""
    return max(MIN_CHECKSUM_BLOCK_BYTES, 1 << (size // MAX_CHECKSUMS).bit_length())


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: key, dtype in safetensors' spelling, shape, and elements as bytes in row-major order."""

    key: str
    dtype: str
    shape: Sequence[int]
    data: memoryview


@dataclass
class SafetensorsFile:
    """A file of `entries` with a checksum for every `checksum_block_bytes` of a tensor.

    Once `iter_bytes` is exhausted, `size` [bytes] and `crc32` describe the file, and `locations` maps the key of an
    entry to its first byte in the file and the CRC-32s of its blocks.
    """

    entries: Sequence[TensorEntry]
    checksum_block_bytes: int
    size: int = 0
    crc32: int = 0
    locations: dict[str, tuple[int, list[int]]] = field(default_factory=dict)

    def iter_bytes(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the file, from the beginning."""
        header = self._header()
        self.size, self.crc32, self.locations = len(header), zlib.crc32(header), {}
        yield header
        for entry in self.entries:
            sums: list[int] = []
            self.locations[entry.key] = self.size, sums
            for at in range(0, len(entry.data), self.checksum_block_bytes):
                part = entry.data[at : at + self.checksum_block_bytes]
                sums.append(zlib.crc32(part))
                self.crc32 = crc.crc32_combine(self.crc32, sums[-1], len(part))
                self.size += len(part)
                yield part

    def _header(self) -> bytes:
        """Return the header: the length of its JSON in eight bytes, then dtype, shape and byte range by key."""
        header, start = {}, 0
        for entry in self.entries:
            end = start + len(entry.data)
            header[entry.key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end]}
            start = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text
