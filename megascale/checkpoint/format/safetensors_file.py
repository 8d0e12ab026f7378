"""A safetensors file as a stream of bytes, with a CRC-32 of the file and of every block of its tensors."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

MIN_CHECKSUM_BLOCK_BYTES = 256 << 10
"""Smallest checksum block. A reader of a part of a tensor reads and checks whole blocks."""

MAX_READ_BYTES = 64 << 20  # largest read, except for a larger shard
MAX_CHECKSUMS = 1 << 20  # approximate limit of checksums in a manifest: a larger checkpoint has larger blocks


def checksum_block_bytes(size: int) -> int:
    """Return the size of a checksum block in bytes, a power of two, for a checkpoint of `size` bytes."""
    return max(MIN_CHECKSUM_BLOCK_BYTES, 1 << (size // MAX_CHECKSUMS).bit_length())


@dataclass
class SafetensorsFile:
    """A file of tensors, with a checksum for every `checksum_block_bytes` of a tensor. `entries`: of each tensor its
    key, dtype in safetensors' spelling, shape, and elements as bytes in row-major order.

    Once `iter_bytes` is exhausted, `size` [bytes] and `crc32` describe the file, and `locations` maps the key of an
    entry to `file`, the name of this one, `start`, the first byte in it, and `sums`, the CRC-32s of its blocks.
    """

    name: str
    entries: Sequence[tuple[str, str, Sequence[int], memoryview]]
    checksum_block_bytes: int
    size: int = 0
    crc32: int = 0
    locations: dict[str, dict[str, Any]] = field(default_factory=dict)

    def iter_bytes(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the file: the length of a JSON text in eight bytes, the text, which has dtype, shape and
        byte range by key, and the elements.
        """
        ranges, end = {}, 0
        for key, dtype, shape, data in self.entries:
            start, end = end, end + len(data)
            ranges[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(ranges).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        self.size, self.crc32, self.locations = len(header), zlib.crc32(header), {}
        yield header
        for key, _, _, data in self.entries:
            sums: list[int] = []
            self.locations[key] = {"file": self.name, "start": self.size, "sums": sums}
            for at in range(0, len(data), self.checksum_block_bytes):
                part = data[at : at + self.checksum_block_bytes]
                sums.append(zlib.crc32(part))
                self.crc32 = crc32_combine(self.crc32, sums[-1], len(part))
                self.size += len(part)
                yield part


GENERATOR = 0xEDB88320  # the polynomial of CRC-32 over GF(2), with the highest power in bit 0


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
