"""Chunking of the loss: the logits of a micro-batch are computed a chunk of tokens at a time, to save memory."""

from __future__ import annotations

import math

CHUNK_BYTES = 1 << 28  # bytes of a chunk's logits in fp32

CHUNK_TOKENS = 2048
"""Tokens that a chunk may have regardless of CHUNK_BYTES. A chunk reads the full weight and accumulates into the full
weight gradient; both must cost little compared with the GEMMs.
"""

BLOCK_BYTES = 1 << 20
"""Bytes of logits per block of a chunk's loss, in the dtype of the loss, on a CPU: a block stays in a core's cache
between passes.
"""


def loss_chunks(rows: int, tokens: int, columns: int) -> int:
    """The number of chunks for `rows` positions with `tokens` tokens in total and `columns` logits per token."""
    max_tokens = max(CHUNK_BYTES // (4 * columns), CHUNK_TOKENS)
    return min(rows, math.ceil(tokens / max_tokens))
