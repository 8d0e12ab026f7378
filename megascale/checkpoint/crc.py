"""CRC-32 of what is joined, from those of its parts.

A checksum is a polynomial over GF(2) modulo the generator, its highest power in bit 0. That of A followed by B is that
of A times x^(8 |B|), plus that of B.
"""

from __future__ import annotations

import functools

GENERATOR = 0xEDB88320
ONE = 1 << 31


def joined(first: int, second: int, length: int) -> int:
    """The checksum of A followed by B, from that of A, that of B and B's length in bytes."""
    return _times(_power(8 * length), first) ^ second


def _times(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (GENERATOR if b & 1 else 0)
    return product


@functools.cache
def _power(exponent: int) -> int:
    """x to this power, by squaring."""
    found, square = ONE, ONE >> 1
    while exponent:
        if exponent & 1:
            found = _times(found, square)
        square = _times(square, square)
        exponent >>= 1
    return found
