"""GEMMs of experts on CPUs, where no dtype needs a kernel of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megascale.ops import grouped_gemm as grouped
from megascale.ops.fp8 import scaled_matmul
from megascale.ops.grouped_gemm import (
    RowGroups,
    add_biases_,
    bias_gradients,
    grouped_gemm,
    grouped_wgrad,
    scaled_grouped_gemm,
)
from megascale.ops.recipe import build_recipe
from megascale.ops.wgrad import torch_wgrad
from tests import blackwell


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


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (8, 9), (12, 0)])
@pytest.mark.parametrize("scale", ["fp32", "pow2"])
def test_rows_in_fp8_are_multiplied_by_torchs_operator_where_it_has_a_kernel(
    capability: tuple[int, int], scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, draw = build_recipe("rowwise", scale=scale), torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*shape, generator=draw).bfloat16() for shape in ((40, 64), (3 * 48, 64)))
    groups = RowGroups((13, 0, 27), torch.tensor([13, 13, 40]).int())
    rows, matrices = recipe.rows["input"].encode(x), recipe.rows["weight"].encode(weight)
    expected = scaled_grouped_gemm(rows, matrices, groups, torch.bfloat16, scaled_matmul)
    calls = list[Any]()

    def operator(*given: Any, **more: Any) -> torch.Tensor:
        calls.append(given)
        return blackwell.scaled_grouped_mm(*given, **more, capability=capability)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", operator)
    monkeypatch.setattr(grouped, "compute_capability", lambda device: capability)
    found = scaled_grouped_gemm(rows, matrices, groups, torch.bfloat16, scaled_matmul)
    assert len(calls) == (capability in {(9, 0), (10, 0)})
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0.05)


X, W = (torch.randn(*shape).to(torch.float8_e4m3fn) for shape in ((40, 64), (3, 48, 64)))
GIVEN: dict[str, Any] = {
    "mat_a": X, "mat_b": W.transpose(1, 2), "scale_a": torch.rand(40), "scale_b": torch.rand(3, 48),
    "offs": torch.tensor([13, 13, 40]).int(), "out_dtype": torch.bfloat16,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"mat_a": X.float().to(torch.float8_e5m2)},
        {"mat_a": X.bfloat16()},
        {"mat_a": X.t().contiguous().t()},  # column-major
        {"mat_b": W.transpose(1, 2).contiguous()},  # row-major
        {"mat_a": X[:, :40].contiguous(), "mat_b": W[..., :40].contiguous().transpose(1, 2)},  # k: no multiple of 16
        {"mat_b": W[:, :40].contiguous().transpose(1, 2), "scale_b": torch.rand(3, 40)},
        {"scale_a": torch.rand(40, 1)},
        {"scale_a": torch.rand(40).bfloat16()},
        {"scale_b": torch.rand(48, 3).t()},
        {"scale_b": torch.rand(144)},
        {"offs": torch.tensor([13, 13, 40])},
        {"offs": torch.tensor([13, 12, 40]).int()},
        {"offs": torch.tensor([13, 13]).int()},
        {"out_dtype": torch.float32},
        {"out_dtype": None},
        {"capability": (10, 3)},
        {"bias": torch.zeros(48)},
    ],
)
def test_the_double_of_grouped_gemms_refuses_what_the_operator_refuses(change: dict[str, Any]) -> None:
    call = partial(blackwell.scaled_grouped_mm, **GIVEN)
    assert call().isfinite().all()
    with pytest.raises((ValueError, NotImplementedError)):
        call(**change)
