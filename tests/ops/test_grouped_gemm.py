"""GEMMs of experts on CPUs, where no dtype needs a kernel of its own."""

from __future__ import annotations

import pytest
import torch

from megascale.ops.grouped_gemm import RowGroups, add_biases_, bias_gradients, grouped_gemm, grouped_wgrad
from megascale.ops.wgrad import torch_wgrad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 7], [0, 0, 0]], ids=str)
def test_rows_meet_the_matrix_of_their_expert(counts: list[int], dtype: torch.dtype) -> None:
    """An expert without rows has a gradient of zero, not of what was there."""
    draw, groups = torch.Generator().manual_seed(1), RowGroups(tuple(counts), torch.tensor(counts).cumsum(0).int())
    weight, x, grad = (
        torch.randn(*shape, generator=draw, dtype=dtype) for shape in ((3, 4, 6), (sum(counts), 6), (sum(counts), 4))
    )
    total, out = torch.full((3, 4, 6), 9.0, dtype=dtype), grouped_gemm(x, weight, groups)
    grouped_wgrad(total, grad, x, groups, torch_wgrad, add=False)
    for expert, rows in enumerate(torch.arange(sum(counts)).split(counts)):
        torch.testing.assert_close(out[rows], x[rows] @ weight[expert].t())
        torch.testing.assert_close(total[expert], grad[rows].t() @ x[rows])
    again = total.clone()
    grouped_wgrad(again, grad, x, groups, torch_wgrad, add=True)
    torch.testing.assert_close(again, 2 * total)


def test_gradients_of_biases_have_the_factors_of_the_forward() -> None:
    """Factors in fp32 are rounded to the dtype of the rows, in forward and in backward."""
    draw, groups = torch.Generator().manual_seed(1), RowGroups((2, 3), torch.tensor([2, 5]).int())
    factors = torch.rand(5, 1, generator=draw)
    bias, grad = (torch.randn(rows, 4, generator=draw).bfloat16() for rows in (2, 5))
    y = torch.zeros(5, 4, dtype=torch.bfloat16)
    add_biases_(y, bias, factors, groups)
    rounded, spread = factors.bfloat16(), bias.repeat_interleave(torch.tensor([2, 3]), 0)
    torch.testing.assert_close(y, rounded * spread, rtol=0, atol=0)
    of_bias, of_factors = bias_gradients(grad, bias, factors, groups)
    by_row = rounded.double() * grad.double()
    expected = torch.stack([by_row[:2].sum(0), by_row[2:].sum(0)]).float()
    torch.testing.assert_close(of_bias, expected, rtol=1e-5, atol=1e-6)
    assert of_factors is not None and of_factors.dtype == torch.float32
    torch.testing.assert_close(of_factors, (grad.float() * spread.float()).sum(1, keepdim=True))
