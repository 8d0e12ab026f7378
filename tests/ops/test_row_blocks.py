"""Blocks of rows."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megascale.ops.row_blocks import row_blocks


@pytest.mark.parametrize("block_bytes", [1, 64, 100, 1000])
def test_blocks_have_every_row_once_in_order(block_bytes: int) -> None:
    rows = torch.arange(10)
    blocks = [rows[block] for block in row_blocks(rows, 32, block_bytes)]
    assert torch.equal(torch.cat(blocks), rows)
    assert all(len(block) == 1 or 32 * len(block) <= block_bytes for block in blocks)


def test_a_tensor_without_values_has_its_largest_block() -> None:
    with FakeTensorMode():
        assert row_blocks(torch.empty(10), 32, 100) == [slice(0, 3)]
