"""In how many pieces a collective travels under the matrix product that forms its tensor, or needs it."""

from __future__ import annotations

import itertools

PIECES = 4
"""Most pieces of a collective: with p of them about 1/p of its time stays exposed."""

PIECE_BYTES = 1 << 19
"""Fewer bytes in a piece cost more in messages than they hide (docs/performance.md)."""


GPU_ROWS = 512
"""Fewest rows of a GEMM on a GPU that is a part of a larger one. Each part reads the whole weight and ends in a wave of
tiles that fills the GPU only in part: 256 rows by 4,608 columns (GPT-3 175B, tp 8) are 36 tiles of 128 x 256 for 132
multiprocessors. With fewer rows it is faster to communicate first and multiply then, as torch's own operators do where
8 ranks have up to 256 rows each (`_should_use_multimem_all_gather_matmul` in torch.distributed._symmetric_memory).
"""

GPU_GROUP = 4
"""Most ranks that send each other direct messages on GPUs. In larger groups a GEMM has fewer columns, so that its parts
need more rows, and over hosts every rank would send its part to each rank of another host.
"""


def pieces_of(rows: int, pieces: int) -> list[slice]:
    """`rows` in at most `pieces` runs, as even as can be."""
    edges = [rows * index // pieces for index in range(pieces + 1)]
    return [slice(low, high) for low, high in itertools.pairwise(edges) if low < high]


def most_pieces(rows: int, batch: int) -> int:
    """Most pieces of `rows` positions of `batch` tokens each such that no piece has a GEMM of fewer than GPU_ROWS rows;
    0 if the whole has fewer.
    """
    return rows // -(-GPU_ROWS // batch)
