"""Pieces of a collective that overlaps with a GEMM: a tp all-gather or reduce-scatter is split along the rows.

    all-gather      | piece 0 | piece 1 | piece 2 | piece 3 |
    GEMM                      | rows 0  | rows 1  | rows 2  | rows 3  |

With p pieces about 1/p of the collective's time stays exposed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megascale.config.finding import Finding
from megascale.config.run import RunConfig

MAX_PIECES = 4  # maximum number of pieces of a collective

MIN_PIECE_BYTES = 1 << 19
"""Minimum bytes of a piece: smaller pieces cost more in messages than their overlap saves (docs/results/overlap.md)."""

MIN_GPU_GEMM_ROWS = 512
"""Minimum rows of a piece's GEMM on a GPU. A piece reads the full weight, and its last wave of tiles fills the GPU only
partly: 256 rows by 4,608 columns (GPT-3 175B, tp 8) are 36 tiles of 128 x 256 for 132 multiprocessors. With fewer rows
a blocking collective followed by the full GEMM is faster. torch's own operators do the same for 8 ranks of up to 256
rows (`_should_use_multimem_all_gather_matmul` in torch.distributed._symmetric_memory).
"""

MAX_GPU_P2P_RANKS = 4
"""Maximum ranks of a group whose pieces are point-to-point messages on GPUs. In larger groups the GEMMs have fewer
columns and their pieces need more rows; across hosts, a rank would send its shard to every rank of another host.
"""


def split_rows(rows: int, pieces: int) -> list[slice]:
    """Split `rows` into at most `pieces` slices, as evenly as possible."""
    edges = [rows * index // pieces for index in range(pieces + 1)]
    return [slice(low, high) for low, high in itertools.pairwise(edges) if low < high]


def max_pieces(rows: int, batch: int) -> int:
    """The maximum number of pieces of `rows` positions of `batch` tokens with at least MIN_GPU_GEMM_ROWS GEMM rows per
    piece; 0 if all rows together are fewer.
    """
    return rows // -(-MIN_GPU_GEMM_ROWS // batch)


def unfused_gemms(config: RunConfig) -> Iterator[Finding]:
    """Warn of sharded activations whose GEMMs have too few rows to overlap with their collectives on GPUs, where only
    those beside wgrad then overlap.
    """
    p, micro = config.parallel, config.batch.micro
    rows = config.row_tokens // p.tp
    if p.tp > 1 and p.sp and config.overlap.tp and rows * micro < MIN_GPU_GEMM_ROWS:
        message = (
            f"= {micro} gives GEMMs of {rows * micro} rows on a rank of tp {p.tp}: below {MIN_GPU_GEMM_ROWS} a GPU has "
            "tp's collectives exposed in forward, and the all-gathers of output gradients in backward"
        )
        yield Finding("batch.micro", message, f"batch.micro = {-(-MIN_GPU_GEMM_ROWS // rows)}, if memory allows")
