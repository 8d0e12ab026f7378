"""FP8 quantization, its statistics, and GEMMs of quantized matrices."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from megascale.catalog.recipes import BLOCK, BLOCK_1D, BLOCK_2D, ROW, TENSOR, QuantizerSpec, ScaleBlock
from megascale.device import Device
from megascale.ops import fp8
from megascale.ops.fp8 import CastRecord, Fp8Kernels, TorchFp8, scaled_matmul
from megascale.ops.quantized import ElementFormat, Quantized
from megascale.ops.recipe import Quantizer
from tests.ops.settings import GPU, setting

M, K, N = 256, 384, 128


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantize(x: Tensor, grain: ScaleBlock, fp8_format: ElementFormat = ElementFormat.E4M3) -> Quantized:
    quantizer = Quantizer(QuantizerSpec(fp8_format.name.lower(), grain))
    return quantizer.encode(x)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


PAIRS = [
    (TENSOR, TENSOR), (ROW, ROW),
    (TENSOR, ROW), (BLOCK_1D, BLOCK_2D),
    (BLOCK_1D, BLOCK_1D),
]  # fmt: skip


@pytest.mark.parametrize(("grain_a", "grain_b"), PAIRS)
@pytest.mark.parametrize(("fp8_format", "budget"), [(ElementFormat.E4M3, 0.04), (ElementFormat.E5M2, 0.065)])
def test_gemms_of_unit_normals_stay_within_their_error_budget(
    grain_a: ScaleBlock, grain_b: ScaleBlock, fp8_format: ElementFormat, budget: float
) -> None:
    a, b = normal(M, K), normal(N, K, seed=1)
    actual = scaled_matmul(quantize(a, grain_a, fp8_format), quantize(b, grain_b), torch.float32)
    assert budget / 4 < error(actual, a @ b.t()) < budget


@pytest.mark.parametrize(("grain_a", "grain_b"), PAIRS)
@pytest.mark.parametrize("fp8_format", [ElementFormat.E4M3, ElementFormat.E5M2])
def test_a_gemm_equals_that_of_the_dequantized_operands(
    grain_a: ScaleBlock, grain_b: ScaleBlock, fp8_format: ElementFormat
) -> None:
    a, b = quantize(normal(M, K), grain_a, fp8_format), quantize(normal(N, K, seed=1), grain_b)
    exact = a.dequantize().double() @ b.dequantize().double().t()
    assert error(scaled_matmul(a, b, torch.float32), exact) < 1e-6
    assert scaled_matmul(a, b, torch.bfloat16).dtype == torch.bfloat16
    assert error(scaled_matmul(a, b, torch.bfloat16), exact) < 2**-8


@pytest.mark.parametrize("grain", [TENSOR, ROW, BLOCK_1D])
def test_a_slice_of_a_quantized_matrix_equals_the_quantized_slice(grain: ScaleBlock) -> None:
    x = quantize(normal(8, 4, K), grain)
    torch.testing.assert_close(x[2:5].dequantize(), x.dequantize()[2:5], rtol=0, atol=0)
    weight = quantize(normal(N, K, seed=1), BLOCK_2D if grain == BLOCK_1D else grain)
    full = scaled_matmul(x, weight, torch.float32)
    assert full.shape == (8, 4, N)
    torch.testing.assert_close(scaled_matmul(x[2:5], weight, torch.float32), full[2:5], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grain", [TENSOR, BLOCK_2D])
def test_a_transpose_equals_the_quantized_transpose(grain: ScaleBlock) -> None:
    x = normal(M, K)
    actual, expected = quantize(x, grain).t(), quantize(x.t().contiguous(), grain)
    assert torch.equal(actual.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(actual.scale, expected.scale) and actual.data.is_contiguous()


def test_strided_inputs_are_transposed_too() -> None:
    """Attention outputs of several samples have such strides."""
    x = normal(3, 16, 32).transpose(0, 1)
    actual, expected = quantize(x, TENSOR).t(), quantize(x.contiguous(), TENSOR).t()
    assert torch.equal(actual.dequantize(), expected.dequantize())


def test_an_outlier_degrades_only_elements_with_its_scale() -> None:
    x = normal(M, K)
    x[3, 5] = 1e6
    for grain, degraded in (
        (TENSOR, M * K),
        (ROW, K),
        (BLOCK_1D, BLOCK),
    ):
        bad = (quantize(x, grain).dequantize() - x).abs() > 0.1 * x.abs() + 1e-3
        assert degraded * 0.9 < int(bad.sum()) < degraded, grain


@pytest.mark.parametrize("grain", [TENSOR, ROW, BLOCK_1D])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("fp8_format", [ElementFormat.E4M3, ElementFormat.E5M2])
def test_nan_and_infinity_propagate(grain: ScaleBlock, value: float, fp8_format: ElementFormat) -> None:
    """The cast alone turns infinity into 448."""
    x = normal(M, K)
    x[3, 5] = value
    square = BLOCK_2D if grain == BLOCK_1D else grain
    out = scaled_matmul(quantize(x, grain, fp8_format), quantize(normal(N, K, seed=1), square), torch.bfloat16)
    assert not bool(out[3].isfinite().any())
    assert grain == TENSOR or bool(out[:3].isfinite().all())


@given(
    st.floats(0, 1e-30),
    st.sampled_from([TENSOR, ROW, BLOCK_1D]),
    st.sampled_from([ElementFormat.E4M3, ElementFormat.E5M2]),
)
@example(1e-36, ROW, ElementFormat.E4M3)
@example(1e-45, BLOCK_1D, ElementFormat.E5M2)
def test_tiny_values_stay_tiny(size: float, grain: ScaleBlock, fp8_format: ElementFormat) -> None:
    x = torch.zeros(2, BLOCK)
    x[0, 5] = size
    actual = quantize(x, grain, fp8_format).dequantize()
    assert 0 <= float(actual[0, 5]) <= 1.1 * size and not actual.count_nonzero() > 1


@given(st.floats(1e-30, 1e30), st.sampled_from([ElementFormat.E4M3, ElementFormat.E5M2]))
def test_the_amax_is_exact_at_any_magnitude(size: float, fp8_format: ElementFormat) -> None:
    x = torch.tensor([[size, -size / 2, 0.0, size / 4]], dtype=torch.float32)
    torch.testing.assert_close(quantize(x, TENSOR, fp8_format).dequantize(), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [M, 13, 1])
@pytest.mark.parametrize("grain", [BLOCK_2D, BLOCK_1D])
def test_a_gpu_multiplies_all_blocks_in_one_call(grain: ScaleBlock, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = quantize(normal(rows, 4 * BLOCK), BLOCK_1D), quantize(normal(N, 4 * BLOCK, seed=1), grain)
    expected = scaled_matmul(a, b, torch.float32)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    actual = fp8._blockwise_mm_cublas(a, b, torch.float32)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    """Stand in for torch's operator, which infers granularities from shapes and strides of scales (ScaledBlas.cpp)."""

    def granularity(scale: Tensor, rows: int, blocks: int) -> ScaleBlock:
        if scale.shape == (rows, blocks) and scale.stride() == (1, rows):
            return BLOCK_1D
        assert scale.shape == (rows / BLOCK, blocks) and scale.is_contiguous()
        return BLOCK_2D

    assert not use_fast_accum, "block scales have no fast accumulation"
    assert a.is_contiguous() and b.t().is_contiguous() and a.shape[0] % 4 == 0
    (m, k), n = a.shape, b.shape[1]
    first = Quantized(a, scale_a, granularity(scale_a, m, k // BLOCK))
    second = Quantized(b.t(), scale_b.t(), granularity(scale_b.t(), n, k // BLOCK))
    return (first.dequantize() @ second.dequantize().t()).to(out_dtype)


H100, BLACKWELL, ADA, AMPERE = (9, 0), (10, 0), (8, 9), (8, 0)


@pytest.mark.parametrize(
    ("capability", "cuda", "recipe", "supported"),
    [
        (AMPERE, "12.9", "tensorwise", False), (AMPERE, "12.9", None, True), (ADA, "12.4", "tensorwise", True),
        (ADA, "12.9", "blockwise", False), (H100, "12.9", "blockwise", True), (H100, "13.0", "blockwise", True),
        (H100, "12.8", "blockwise", False), (H100, "12.6", "rowwise", True), (BLACKWELL, "13.0", "blockwise", False),
        (BLACKWELL, "13.0", "static", True),
    ],
)  # fmt: skip
def test_support_by_gpu_cuda_and_recipe(
    capability: tuple[int, int], cuda: str, recipe: str | None, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(Device, "capability", capability)
    reason = TorchFp8().unsupported_reason(replace(setting(torch.bfloat16, GPU), recipe=recipe))
    assert (reason is None) == supported, reason


def test_zeros_stay_zeros() -> None:
    assert torch.equal(quantize(torch.zeros(4, 16), ROW).dequantize(), torch.zeros(4, 16))


def test_saturated_and_flushed_elements_are_counted() -> None:
    x = torch.tensor([[1.0, 500.0, -500.0, 449.0, 1e-5, 0.0, 2.0, 3.0]])
    record = CastRecord(torch.tensor(7.0), torch.zeros(3, dtype=torch.int64))
    actual = Quantizer(QuantizerSpec("e4m3", TENSOR)).encode(x, torch.tensor(448.0), record=record)
    assert record.counts is not None
    assert record.counts.tolist() == [2, 1, 8]  # 449 rounds to 448; a zero is not flushed
    assert record.amax == 500 and actual.scale == 1 and actual.data.float().abs().max() == 448


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("fp8_format", [ElementFormat.E4M3, ElementFormat.E5M2])
def test_what_is_not_finite_becomes_nan_with_an_expected_amax(fp8_format: ElementFormat, value: float) -> None:
    """Finite elements keep their codes, also where their product with the factor is beyond fp32."""
    x = torch.tensor([[1e30, 1.0, value, -2.0]])
    actual = Quantizer(QuantizerSpec(fp8_format.name.lower(), TENSOR)).encode(x, torch.tensor(1e-20)).data.float()
    assert actual[0, 2].isnan() and actual[0, [0, 1, 3]].abs().eq(fp8_format.max_value).all()


def cast_of_a_view(x: Tensor, *given: Any) -> Quantized:
    return fp8.cast(x.contiguous(), *given)


@pytest.mark.parametrize("fp8_format", [ElementFormat.E4M3, ElementFormat.E5M2])
def test_a_transpose_by_the_cast_kernel_changes_no_fp8_value(fp8_format: ElementFormat) -> None:
    all_values = torch.arange(256, dtype=torch.uint8).view(16, 16).view(fp8_format.dtype)
    finite = torch.where(all_values.float().isfinite(), all_values.float(), 0.0).to(fp8_format.dtype)
    quantizer = Quantizer(
        QuantizerSpec(fp8_format.name.lower(), TENSOR), kernels=Fp8Kernels(cast=cast_of_a_view, strided=True)
    )
    actual = quantizer.transpose(Quantized(finite, torch.ones(()), TENSOR))
    assert torch.equal(actual.data.view(torch.uint8), finite.t().contiguous().view(torch.uint8))
