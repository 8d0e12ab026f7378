"""Adding rows into a table: the backward of an embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def add_rows_(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """table[index[i]] += rows[i] for index [n] and rows [n, h], in place and in a fixed order of additions."""
    if table.is_cpu:
        table.index_add_(0, index, rows)  # serial in i
    else:
        table.index_put_((index,), rows, accumulate=True)  # sorts, where index_add_ would use atomic additions


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """table[index], for index of any shape."""
    return torch.nn.functional.embedding(index, table)
