"""What a cast to 8 bits keeps, and products of what was cast."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from megascale.device import Device
from megascale.ops import fp8
from megascale.ops.fp8 import BLOCK, Grain, Number, Quantized, TorchLinear, amax, cast, lost, product, scale_of
from tests.ops.settings import GPU, setting

M, K, N = 256, 384, 128


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantize(x: Tensor, grain: Grain, number: Number = Number.E4M3) -> Quantized:
    return cast(x, scale_of(amax(x, grain), number), number, grain)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


PAIRS = [
    (Grain.TENSOR, Grain.TENSOR), (Grain.ROW, Grain.ROW), (Grain.TENSOR, Grain.ROW), (Grain.BLOCK, Grain.SQUARE),
    (Grain.BLOCK, Grain.BLOCK),
]  # fmt: skip


@pytest.mark.parametrize(("grain_a", "grain_b"), PAIRS)
@pytest.mark.parametrize(("number", "budget"), [(Number.E4M3, 0.04), (Number.E5M2, 0.065)])
def test_products_of_unit_normals_keep_to_their_error_budget(
    grain_a: Grain, grain_b: Grain, number: Number, budget: float
) -> None:
    a, b = normal(M, K), normal(N, K, seed=1)
    found = product(quantize(a, grain_a, number), quantize(b, grain_b), torch.float32)
    assert budget / 4 < error(found, a @ b.t()) < budget


@pytest.mark.parametrize(("grain_a", "grain_b"), PAIRS)
@pytest.mark.parametrize("number", list(Number))
def test_a_product_is_that_of_what_was_cast(grain_a: Grain, grain_b: Grain, number: Number) -> None:
    a, b = quantize(normal(M, K), grain_a, number), quantize(normal(N, K, seed=1), grain_b)
    exact = a.dequantized().double() @ b.dequantized().double().t()
    assert error(product(a, b, torch.float32), exact) < 1e-6
    assert product(a, b, torch.bfloat16).dtype == torch.bfloat16
    assert error(product(a, b, torch.bfloat16), exact) < 2**-8


@pytest.mark.parametrize("grain", [Grain.TENSOR, Grain.ROW, Grain.BLOCK])
def test_rows_of_a_cast_are_the_cast_of_rows(grain: Grain) -> None:
    x = quantize(normal(8, 4, K), grain)
    torch.testing.assert_close(x[2:5].dequantized(), x.dequantized()[2:5], rtol=0, atol=0)
    weight = quantize(normal(N, K, seed=1), Grain.SQUARE if grain is Grain.BLOCK else grain)
    whole = product(x, weight, torch.float32)
    assert whole.shape == (8, 4, N)
    torch.testing.assert_close(product(x[2:5], weight, torch.float32), whole[2:5], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grain", [Grain.TENSOR, Grain.SQUARE])
def test_a_transpose_is_the_cast_of_the_transpose(grain: Grain) -> None:
    x = normal(M, K)
    turned, other = quantize(x, grain).t(), quantize(x.t().contiguous(), grain)
    assert torch.equal(turned.data.view(torch.uint8), other.data.view(torch.uint8))
    assert torch.equal(turned.scale, other.scale) and turned.data.is_contiguous()


def test_what_lies_otherwise_in_memory_is_transposed_too() -> None:
    """As what one head attends to does, for several samples."""
    x = normal(3, 16, 32).transpose(0, 1)
    turned, other = quantize(x, Grain.TENSOR).t(), quantize(x.contiguous(), Grain.TENSOR).t()
    assert torch.equal(turned.dequantized(), other.dequantized())


def test_one_outlier_spoils_what_shares_its_scale_and_nothing_else() -> None:
    x = normal(M, K)
    x[3, 5] = 1e6
    for grain, spoilt in ((Grain.TENSOR, M * K), (Grain.ROW, K), (Grain.BLOCK, BLOCK)):
        bad = (quantize(x, grain).dequantized() - x).abs() > 0.1 * x.abs() + 1e-3
        assert spoilt * 0.9 < int(bad.sum()) < spoilt, grain


@pytest.mark.parametrize("grain", [Grain.TENSOR, Grain.ROW, Grain.BLOCK])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("number", list(Number))
def test_what_is_not_finite_stays_so(grain: Grain, value: float, number: Number) -> None:
    """The cast alone makes 448 of an infinity."""
    x = normal(M, K)
    x[3, 5] = value
    square = Grain.SQUARE if grain is Grain.BLOCK else grain
    out = product(quantize(x, grain, number), quantize(normal(N, K, seed=1), square), torch.bfloat16)
    assert not bool(out[3].isfinite().any())
    assert grain is Grain.TENSOR or bool(out[:3].isfinite().all())


@given(st.floats(0, 1e-30), st.sampled_from([Grain.TENSOR, Grain.ROW, Grain.BLOCK]), st.sampled_from(list(Number)))
@example(1e-36, Grain.ROW, Number.E4M3)
@example(1e-45, Grain.BLOCK, Number.E5M2)
def test_what_is_next_to_zero_stays_next_to_zero(size: float, grain: Grain, number: Number) -> None:
    x = torch.zeros(2, BLOCK)
    x[0, 5] = size
    found = quantize(x, grain, number).dequantized()
    assert 0 <= float(found[0, 5]) <= 1.1 * size and not found.count_nonzero() > 1


@given(st.floats(1e-30, 1e30), st.sampled_from(list(Number)))
def test_the_largest_magnitude_is_kept_exactly_at_any_size(size: float, number: Number) -> None:
    x = torch.tensor([[size, -size / 2, 0.0, size / 4]], dtype=torch.float32)
    torch.testing.assert_close(quantize(x, Grain.TENSOR, number).dequantized(), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("grain", [Grain.SQUARE, Grain.BLOCK])
def test_blocks_are_multiplied_at_once_on_a_gpu(grain: Grain, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = quantize(normal(M, 4 * BLOCK), Grain.BLOCK), quantize(normal(N, 4 * BLOCK, seed=1), grain)
    expected = product(a, b, torch.float32)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    found = fp8._blocks_at_once(a.data, b, a.scale, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    """Stands for torch's operator, which finds out what scales are by their shapes and strides (ScaledBlas.cpp)."""

    def of(scale: Tensor, rows: int, blocks: int) -> Grain:
        if scale.shape == (rows, blocks) and scale.stride() == (1, rows):
            return Grain.BLOCK
        assert scale.shape == (rows / BLOCK, blocks) and scale.is_contiguous()
        return Grain.SQUARE

    assert not use_fast_accum, "there is none by blocks"
    assert a.is_contiguous() and b.t().is_contiguous()
    (m, k), n = a.shape, b.shape[1]
    first = Quantized(a, scale_a, of(scale_a, m, k // BLOCK))
    second = Quantized(b.t(), scale_b.t(), of(scale_b.t(), n, k // BLOCK))
    return (first.dequantized() @ second.dequantized().t()).to(out_dtype)


H100, BLACKWELL, ADA, AMPERE = (9, 0), (10, 0), (8, 9), (8, 0)


@pytest.mark.parametrize(
    ("capability", "cuda", "recipe", "able"),
    [
        (AMPERE, "12.9", "tensorwise", False), (AMPERE, "12.9", None, True), (ADA, "12.4", "tensorwise", True),
        (ADA, "12.9", "blockwise", False), (H100, "12.9", "blockwise", True), (H100, "13.0", "blockwise", True),
        (H100, "12.8", "blockwise", False), (H100, "12.6", "rowwise", True), (BLACKWELL, "13.0", "blockwise", False),
        (BLACKWELL, "13.0", "mu_unit", True),
    ],
)  # fmt: skip
def test_a_gpu_that_cannot_multiply_is_refused(
    capability: tuple[int, int], cuda: str, recipe: str | None, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(Device, "capability", capability)
    reason = TorchLinear().refusal(replace(setting(torch.bfloat16, GPU), recipe=recipe))
    assert (reason is None) == able, reason


def test_zeros_stay_zeros() -> None:
    assert torch.equal(quantize(torch.zeros(4, 16), Grain.ROW).dequantized(), torch.zeros(4, 16))


def test_what_a_cast_loses_is_counted() -> None:
    x = torch.tensor([[1.0, 500.0, -500.0, 449.0, 1e-5, 0.0, 2.0, 3.0]])
    found = cast(x, torch.tensor(1.0), Number.E4M3, Grain.TENSOR)
    assert lost(x, found, Number.E4M3).tolist() == [2, 1, 8]  # 449 is within the rounding of 448; 0 was zero before
    assert found.data.float().abs().max() == 448


@pytest.mark.parametrize("number", list(Number))
def test_a_cast_of_what_is_in_eight_bits_already_changes_nothing(number: Number) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(16, 16).view(number.dtype)
    whole = torch.where(every.float().isfinite(), every.float(), 0.0).to(number.dtype)
    found = fp8.Kernels(cast_transpose=fp8.cast_transpose).transposed(Quantized(whole, torch.ones(()), Grain.TENSOR))
    assert torch.equal(found.data.view(torch.uint8), whole.t().contiguous().view(torch.uint8))
