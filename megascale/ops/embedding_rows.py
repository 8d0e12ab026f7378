"""Embedding lookup and its backward, a deterministic scatter-add of rows."""

from __future__ import annotations

import torch
from torch import Tensor


def add_rows_(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add rows [n, h] to table[index], index [n], in place and in a fixed order of additions."""
    if table.is_cpu:
        table.index_add_(0, index, rows)  # serial in i
    else:
        table.index_put_((index,), rows, accumulate=True)  # sorts; index_add_ would use atomic additions


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """Return table[index] for an index of any shape."""
    return torch.nn.functional.embedding(index, table)
