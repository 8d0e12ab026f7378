"""A safetensors file as a stream of bytes, with a CRC-32 of the file and of every block of its tensors."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MIN_CHECKSUM_BLOCK_BYTES = 256 << 10
"""Smallest checksum block. A reader of a part of a tensor reads and checks whole blocks."""

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
                self.crc32 = crc32_combine(self.crc32, sums[-1], len(part))
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


GENERATOR = 0xEDB88320
"""The polynomial of CRC-32 over GF(2), with the highest power in bit 0."""


def crc32_combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of A + B from crc(A), crc(B) and the length of B in bytes: crc(A) x^(8 length) + crc(B)."""
    return _multiply(_power(8 * length), first) ^ second


def _multiply(a: int, b: int) -> int:
    """Multiply two polynomials modulo the generator."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (GENERATOR if b & 1 else 0)
    return result


@functools.cache
def _power(exponent: int) -> int:
    """Return x^exponent, by squaring."""
    result, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        exponent >>= 1
    return result
