"""Weights' gradients on a GPU: bf16 factors, fp32 sums, one GEMM for each micro-batch and nothing beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megascale.ops.select import select_backend
from megascale.ops.wgrad import AddmmWgrad, addmm_wgrad
from tests.ops.settings import GPU, setting

pytestmark = pytest.mark.gpu(1, only=True)

N, K, T, MICRO_BATCHES = 3072, 1024, 2048, 8


def factors(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator("cuda").manual_seed(seed)
    grad, x = (torch.randn(T, n, generator=draw, device="cuda", dtype=torch.bfloat16) for n in (N, K))
    return grad, x


def test_torchs_gemm_serves() -> None:
    assert AddmmWgrad().unsupported_reason(setting(torch.bfloat16, GPU)) is None
    assert select_backend("wgrad", setting(torch.bfloat16, GPU)).backend == "addmm"


def test_the_sum_over_micro_batches_is_that_of_fp64() -> None:
    total = torch.full((N, K), torch.nan, device="cuda")
    exact = torch.zeros(N, K, device="cuda", dtype=torch.float64)
    for index in range(MICRO_BATCHES):
        grad, x = factors(index)
        addmm_wgrad(total, grad, x, index > 0)
        exact += grad.double().t() @ x.double()
    error = float((total.double() - exact).abs().max() / exact.abs().max())
    assert error < 1e-5, f"{error:.1e}: a product that is rounded to bf16 is off by 2e-3"


def test_no_product_is_allocated() -> None:
    """The caching allocator's peak does not rise: cuBLAS' workspace is there after the first call."""
    grad, x = factors(0)
    total = torch.empty(N, K, device="cuda")
    for add in (False, True):
        addmm_wgrad(total, grad, x, add)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for index in range(MICRO_BATCHES):
        addmm_wgrad(total, grad, x, index > 0)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < N * K
