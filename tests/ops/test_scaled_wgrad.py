"""The Triton GEMM that accumulates into a weight's gradient, run on a CPU by Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megascale.catalog.recipes import BLOCK_1D, BLOCK_2D, ROW, TENSOR, QuantizerSpec, ScaleBlock
from megascale.ops import fp8
from megascale.ops.quantized import ElementFormat, Quantized
from megascale.ops.recipe import Quantizer
from tests.ops.interpreter import compile_for_hopper, interpreted

pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")

MODULE = "megascale.ops.scaled_wgrad"


@pytest.fixture
def module() -> Iterator[Any]:
    with interpreted(MODULE) as kernels:
        yield kernels


def quantized(rows: int, k: int, block: ScaleBlock, element: ElementFormat, *, turned: bool = False) -> Quantized:
    """Quantize numbers of growing rows and columns, which expose a misplaced scale. `turned`: scales as the cast of a
    view of a transpose has them, with the rows of other blocks beside each other.
    """
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)) * torch.linspace(1, 8, rows).view(-1, 1)
    found = Quantizer(QuantizerSpec(element.name.lower(), block)).encode(x * torch.linspace(1, 8, k))
    scale = found.scale.t().contiguous().t() if turned else found.scale
    return Quantized(found.data, scale, block)


@pytest.mark.parametrize("block", [TENSOR, ROW, BLOCK_1D], ids=str)
@pytest.mark.parametrize(("n", "k", "tokens"), [(256, 128, 384), (144, 272, 128), (16, 48, 80)])
@pytest.mark.parametrize("turned", [False, True])
def test_two_micro_batches_equal_those_of_fp64(
    module: Any, block: ScaleBlock, n: int, k: int, tokens: int, turned: bool
) -> None:
    """The first overwrites NaN."""
    if block == BLOCK_1D and tokens % 128:
        tokens = 128
    grad = quantized(n, tokens, block, ElementFormat.E5M2 if block == TENSOR else ElementFormat.E4M3, turned=turned)
    x = quantized(k, tokens, block, ElementFormat.E4M3, turned=turned)
    total, theirs = (torch.full((n, k), math.nan) for _ in range(2))
    exact = grad.dequantize().double() @ x.dequantize().double().t()
    for micro_batch, add in enumerate((False, True), 1):
        module.scaled_wgrad(total, grad, x, add)
        fp8.scaled_wgrad(theirs, grad, x, add)
        largest = (micro_batch * exact).abs().amax()
        assert (total - micro_batch * exact).abs().amax() < 1e-6 * largest
        assert (total - theirs).abs().amax() < 1e-6 * largest


def test_other_scales_are_torchs(module: Any) -> None:
    grad, x = (quantized(128, 256, BLOCK_2D, ElementFormat.E4M3), quantized(128, 256, BLOCK_1D, ElementFormat.E4M3))
    total, theirs = torch.zeros(128, 128), torch.zeros(128, 128)
    module.scaled_wgrad(total, x, grad, True)
    fp8.scaled_wgrad(theirs, x, grad, True)
    assert torch.equal(total, theirs)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_it_compiles_for_hopper(in_blocks: bool) -> None:
    """To tensor cores' own instructions of FP8, fed by asynchronous copies; the gradient moves in vectors, and no
    element has an integer division of its own, which is a hundred instructions.
    """
    types = {"a": "*fp8e5", "b": "*fp8e4nv", "scale_a": "*fp32", "scale_b": "*fp32", "total": "*fp32"}
    types |= dict.fromkeys(("m", "n", "k", "row_a", "along_a", "row_b", "along_b"), "i32")
    constants = {"ADD": True, "IN_BLOCKS": in_blocks, "SIDE": 128, "BLOCK": 128, "GROUP": 8}
    assembly = compile_for_hopper(MODULE, "_fp8_gemm", types, constants, 8, 3)
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e5m2.e4m3" in assembly and "cp.async.cg" in assembly
    assert "ld.global.v4" in assembly and "st.global.v4" in assembly and "st.global.b32" not in assembly
    assert "rem.s64" not in assembly and "rem.u64" not in assembly
