"""CRC-32 of two byte strings joined, from the CRC-32 of both.

A CRC-32 is a polynomial over GF(2) modulo the generator, with the highest power in bit 0:

    crc(A + B) = crc(A) x^(8 len(B)) + crc(B)
"""

from __future__ import annotations

import functools

GENERATOR = 0xEDB88320
ONE = 1 << 31


def crc32_combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of A + B from crc(A), crc(B) and the length of B in bytes."""
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
    result, square = ONE, ONE >> 1
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        exponent >>= 1
    return result
