"""Blocks of rows whose temporaries stay in a cache."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def row_blocks(tensor: Tensor, row_bytes: int, block_bytes: int) -> list[slice]:
    """Return slices of the rows of a tensor, of at most `block_bytes` each, and at least one row.

    Of a tensor without values only the first: the others need as much memory, and elementwise operators count no FLOPs.
    """
    rows = max(1, block_bytes // row_bytes)
    slices = [slice(start, start + rows) for start in range(0, len(tensor), rows)]
    return slices[:1] if isinstance(tensor, FakeTensor) else slices
