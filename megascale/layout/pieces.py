"""Pieces of a collective that overlaps with a GEMM: a tp all-gather or reduce-scatter is split along the rows.

    all-gather      | piece 0 | piece 1 | piece 2 | piece 3 |
    GEMM                      | rows 0  | rows 1  | rows 2  | rows 3  |

With p pieces about 1/p of the collective's time stays exposed.
"""

from __future__ import annotations

import itertools

MAX_PIECES = 4  # maximum number of pieces of a collective

MIN_PIECE_BYTES = 1 << 19
"""Minimum bytes of a piece: smaller pieces cost more in messages than their overlap saves (docs/results/overlap.md)."""


def split_rows(rows: int, pieces: int) -> list[slice]:
    """Split `rows` into at most `pieces` slices, as evenly as possible."""
    edges = [rows * index // pieces for index in range(pieces + 1)]
    return [slice(low, high) for low, high in itertools.pairwise(edges) if low < high]
