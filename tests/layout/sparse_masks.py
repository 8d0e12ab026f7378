"""The mask of a sparse pattern, element by element, from its definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.config.sparse_pattern import SparsePattern


def sees(pattern: SparsePattern, head: int, query: int, key: int) -> bool:
    """Return True if a query sees a key of its document, both by their places in it."""
    own, theirs = query // pattern.block, key // pattern.block
    is_near, is_strided = own - theirs < pattern.local_blocks, (theirs + head) % pattern.stride == 0
    return key <= query and (is_near or is_strided)


def mask_of(pattern: SparsePattern, heads: Sequence[int], length: int, starts: Sequence[int] = (0,)) -> Tensor:
    """Return what heads see in a row of documents, bool [heads, length, length]."""
    begins = [max(start for start in starts if start <= place) for place in range(length)]
    rows = [
        [
            [
                begins[query] == begins[key] and sees(pattern, head, query - begins[query], key - begins[key])
                for key in range(length)
            ]
            for query in range(length)
        ]
        for head in heads
    ]
    return torch.tensor(rows, dtype=torch.bool)
