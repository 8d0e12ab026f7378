"""Casts to E4M3 and E5M2: of every bf16 number, byte by byte with each format of scales, and their errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megascale.catalog.recipes import BLOCK_1D, BLOCK_2D, MX, ROW, TENSOR, QuantizerSpec, ScaleBlock
from megascale.ops.quantized import ElementFormat
from megascale.ops.recipe import Quantizer
from tests.ops.draws import KINDS, draw

E4M3, E5M2 = ElementFormat.E4M3, ElementFormat.E5M2
WIDTHS = {E4M3: (4, 3), E5M2: (5, 2)}  # bits of exponent and mantissa


def number(code: int, element: ElementFormat) -> float:
    """The number of a positive code, by the definition of the format."""
    exponent, mantissa = WIDTHS[element]
    field, rest, bias = code >> mantissa, code & (1 << mantissa) - 1, 2 ** (exponent - 1) - 1
    whole = rest / 2**mantissa + (field > 0)
    return whole * 2.0 ** (max(field, 1) - bias)


@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_every_number_goes_to_the_nearest_and_half_way_to_an_even_code(element: ElementFormat) -> None:
    x = torch.arange(65_536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    unscaled = torch.tensor(element.max_value)
    codes = Quantizer(QuantizerSpec(element.name.lower(), TENSOR)).encode(x[None], unscaled).codes[0].numpy()
    values = np.array([number(code, element) for code in range(128)])
    values = values[values <= element.max_value]
    between = (values[1:] + values[:-1]) / 2
    magnitude = np.minimum(x.abs().double().numpy(), element.max_value)
    finite = x.isfinite().numpy()
    below, above = np.searchsorted(between, magnitude, "left"), np.searchsorted(between, magnitude, "right")
    nearest = np.where(below % 2 == 0, below, above)  # the same but half-way
    expected = nearest + 128 * torch.signbit(x).numpy()
    assert np.array_equal(codes[finite], expected[finite])
    assert torch.from_numpy(codes[~finite]).view(element.dtype).float().isnan().all()


@pytest.mark.parametrize(("spec", "values", "scale", "codes", "decoded"), [
    (QuantizerSpec("e4m3", TENSOR), (3.5, -1, 2.0**-7, 2), 2.0**-7, "7EF03878", None),
    (QuantizerSpec("e5m2", TENSOR), (3.5, -1, 2.0**-7, 2), 2.0**-14, "7BF45878", None),
    (QuantizerSpec("e4m3", TENSOR), (3, -1, 0.005, 2), 0.0066964286, "7EF13479", (3, -27 / 28, 0.0050223214, 27 / 14)),
    (QuantizerSpec("e4m3", TENSOR, scale="pow2"), (3, -1, 0.005, 2), 2.0**-7, "7CF03278", (3, -1, 0.0048828125, 2)),
])  # fmt: skip
def test_golden_codes(
    spec: QuantizerSpec, values: tuple[float, ...], scale: float, codes: str, decoded: tuple[float, ...] | None
) -> None:
    found = Quantizer(spec).encode(torch.tensor([values], dtype=torch.float32))
    assert float(found.scale) == pytest.approx(scale, rel=1e-7)
    assert bytes(found.codes[0].tolist()).hex().upper() == codes
    torch.testing.assert_close(found.dequantize()[0], torch.tensor(decoded or values).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("element", "block", "scale", "percent"), [
    ("e4m3", TENSOR, "fp32", 2.66), ("e5m2", TENSOR, "fp32", 5.28), ("e4m3", ROW, "fp32", 2.64),
    ("e4m3", BLOCK_1D, "fp32", 2.57), ("e4m3", BLOCK_2D, "fp32", 2.64), ("e4m3", TENSOR, "pow2", 2.65),
    ("e5m2", MX, "e8m0", 5.30),
])  # fmt: skip
def test_errors_of_gaussian_numbers(element: str, block: ScaleBlock, scale: str, percent: float) -> None:
    x = draw("gaussian", 512, 1024)
    error = (Quantizer(QuantizerSpec(element, block, scale=scale)).encode(x).dequantize() - x).norm() / x.norm()
    assert 100 * float(error) == pytest.approx(percent, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("block", "scale"), [(ROW, "pow2"), (BLOCK_1D, "pow2"), (BLOCK_2D, "pow2"), (MX, "e8m0")])
def test_with_powers_of_two_numbers_matter_little(kind: str, block: ScaleBlock, scale: str) -> None:
    x = draw(kind, 512, 1024)
    error = (Quantizer(QuantizerSpec("e4m3", block, scale=scale)).encode(x).dequantize() - x).norm() / x.norm()
    assert 100 * float(error) == pytest.approx(2.67, rel=0.05)
