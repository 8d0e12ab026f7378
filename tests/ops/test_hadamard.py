"""The random Hadamard transform: its matrix, and the sum over tokens that it leaves as it is."""

from __future__ import annotations

import torch

from megascale.ops.hadamard import rotate


def test_the_matrix() -> None:
    assert rotate(4 * torch.eye(16))[3].tolist() == [-1, 1, 1, -1] * 4
    assert rotate(torch.ones(16)).tolist() == [-1, 0, 1, 0, 1, 0, -1, 0, 1, 2, 1, 0, 1, 0, 1, -2]
    matrix = rotate(4 * torch.eye(16)).double()
    assert torch.equal(matrix.abs(), torch.ones(16, 16).double())
    assert torch.equal(matrix @ matrix.t(), 16 * torch.eye(16).double())


def test_groups_are_of_16_elements_along_the_last_dimension() -> None:
    x = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    parts = torch.cat([rotate(part) for part in x.split(16, -1)], -1)
    assert torch.equal(rotate(x), parts)
    assert rotate(x).dtype == rotate(x.float()).dtype == torch.bfloat16
    turned = x.flatten(0, 1).t().contiguous().t()
    assert torch.equal(rotate(turned), rotate(x).flatten(0, 1))


def test_a_sum_over_tokens_is_that_of_unrotated_operands_up_to_rounding() -> None:
    draw = torch.Generator().manual_seed(1)
    grad, x = (torch.randn(features, 256, generator=draw).bfloat16() for features in (32, 64))
    plain, rotated = grad.double() @ x.double().t(), rotate(grad).double() @ rotate(x).double().t()
    size = grad.double().norm(dim=1, keepdim=True) * x.double().norm(dim=1)
    assert ((plain - rotated).abs() / size).max() < 2**-8
    assert not torch.equal(rotate(grad), grad)


def test_outliers_of_one_token_are_spread() -> None:
    x = torch.zeros(1, 16)
    x[0, 6] = 64
    assert rotate(x).abs().tolist() == [[16.0] * 16]
