"""Embedding lookup, and the scatter-add of its backward."""

from __future__ import annotations

import torch

from megascale.ops.embedding_rows import add_rows_, lookup


def test_add_rows_counts_every_occurrence_of_an_index() -> None:
    index = torch.tensor([3, 0, 3, 3, 1])
    rows = torch.arange(10.0).view(5, 2)
    table = torch.full((5, 2), 100.0)
    add_rows_(table, index, rows)
    expected = torch.full((5, 2), 100.0)
    for i, row in zip(index.tolist(), rows, strict=True):
        expected[i] += row
    assert torch.equal(table, expected)


def test_add_rows_is_the_transpose_of_lookup() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7, 3, generator=generator, dtype=torch.float64).requires_grad_()
    index = torch.randint(7, (4, 5), generator=generator)
    rows = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    (expected,) = torch.autograd.grad((table[index] * rows).sum(), table)
    assert torch.equal(lookup(table, index), table[index])
    grad = torch.zeros_like(table)
    add_rows_(grad, index.view(-1), rows.view(-1, 3))
    torch.testing.assert_close(grad, expected, rtol=1e-14, atol=1e-14)
