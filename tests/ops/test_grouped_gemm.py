"""GEMMs of experts on CPUs, where no dtype needs a kernel of its own."""

from __future__ import annotations

import pytest
import torch

from megascale.ops.grouped_gemm import RowGroups, grouped_gemm, grouped_wgrad
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
