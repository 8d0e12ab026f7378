"""In how many chunks of tokens the loss of a micro-batch is formed: the logits of one chunk exist at a time."""

from __future__ import annotations

import math

CHUNK_BYTES = 1 << 28
"""Logits that a chunk may have, in bytes of fp32."""

CHUNK_TOKENS = 2048
"""Tokens that a chunk may have, however many columns: each chunk reads the weight and adds to its whole gradient, which
must stay little beside the products.
"""

BLOCK_BYTES = 1 << 20
"""Of a chunk's logits what is worked on at once in the format of the loss, on a CPU: what stays in a core's cache from
one pass to the next.
"""


def loss_chunks(rows: int, tokens: int, columns: int) -> int:
    """Chunks for `rows` positions that stand for `tokens` tokens, with `columns` logits a token on this rank."""
    most = max(CHUNK_BYTES // (4 * columns), CHUNK_TOKENS)
    return min(rows, math.ceil(tokens / most))
