"""In how many pieces a collective travels under the matrix product that forms its tensor, or needs it."""

from __future__ import annotations

import itertools

PIECES = 4
"""Most pieces of a collective: with p of them about 1/p of its time stays exposed."""

PIECE_BYTES = 1 << 19
"""Fewer bytes in a piece cost more in messages than they hide (docs/performance.md)."""


def pieces_of(rows: int, pieces: int) -> list[slice]:
    """`rows` in at most `pieces` runs, as even as can be."""
    edges = [rows * index // pieces for index in range(pieces + 1)]
    return [slice(low, high) for low, high in itertools.pairwise(edges) if low < high]
