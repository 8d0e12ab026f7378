"""MXFP8: codes and scales byte by byte, transposes, and what is not finite, zero or tiny."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.catalog.recipes import RECIPES
from megascale.ops.block_scaled_gemm import decoded_matmul
from megascale.ops.quantized import Quantized
from megascale.ops.recipe import build_recipe
from tests.ops.draws import KINDS, draw

RECIPE = build_recipe("mxfp8")
ROW, COLUMN = RECIPE.rows["input"], RECIPE.columns["input"]


def encoded(*values: float, dtype: torch.dtype = torch.float32) -> Quantized:
    """One block that begins with these numbers."""
    return ROW.encode(torch.tensor([[*values, *[0.0] * (32 - len(values))]], dtype=dtype))


@pytest.mark.parametrize(
    ("values", "scale", "codes", "decoded"),
    [
        ((448, -224, 1, 0.5), 127, "7EF63830", (448, -224, 1, 0.5)),
        ((500, -250, 3, 0.1), 128, "78F03C15", (512, -256, 3, 0.1015625)),
        ((1.7578125, 1, -0.01, 0), 120, "7670BA00", (1.75, 1, -0.009765625, 0)),
        ((2.0**-120, 2.0**-125), 0, "7048", (2.0**-120, 2.0**-125)),
        ((2.0**-130, 2.0**-133), 0, "2008", (2.0**-130, 2.0**-133)),
        ((3.3895e38, 1e38), 247, "7869", (math.inf, 9 * 2.0**123)),
        ((), 0, "0000", (0.0, 0.0)),
    ],
)
def test_blocks_have_the_codes_of_the_format(
    values: tuple[float, ...], scale: int, codes: str, decoded: tuple[float, ...]
) -> None:
    """NVIDIA's scales, rounded up (PTX's cvt.rp.satfinite.ue8m0x2). The largest number decodes to 2^128."""
    block = encoded(*values)
    assert block.scale.view(torch.uint8).tolist() == [[scale]]
    length = len(codes) // 2
    assert bytes(block.codes[0, :length].tolist()).hex().upper() == codes and not block.codes[0, length:].any()
    assert block.dequantize()[0, :length].tolist() == list(decoded)


def test_scales_rounded_down_would_saturate() -> None:
    """The rule of the OCP's specification, floor, for comparison."""
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    exponents = torch.frexp(x.abs().amax(1, keepdim=True)).exponent - 1 - 8
    floor = (x * torch.exp2(-exponents.float())).abs().amax(1) > 448
    assert 0.15 < floor.float().mean() < 0.19
    ours = ROW.encode(x)
    assert (x.abs().amax(1) <= 448 * ours.scale.float().squeeze(1)).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, 31])
def test_a_block_with_what_is_not_finite_is_not_a_number(value: float, place: int) -> None:
    x = torch.ones(4, 64)
    x[2, 32 + place] = value
    codes = ROW.encode(x)
    assert codes.scale.view(torch.uint8)[2, 1] == 255 and codes.dequantize()[2, 32:].isnan().all()
    assert codes.dequantize().isfinite().sum() == 4 * 64 - 32
    assert ROW.amax(x)[2, 1].isfinite().logical_not()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 77, 2047, 6143])
@pytest.mark.parametrize("poisoned", ["x", "weight", "gradient"])
def test_every_result_that_depends_on_it_is_not_finite(poisoned: str, place: int, value: float) -> None:
    """Forward, dgrad and wgrad of a layer, with transposes from codes."""
    tensors = {"x": draw("gaussian", 64, 96), "weight": draw("gaussian", 64, 96, 1)}
    tensors["gradient"] = draw("gaussian", 64, 64, 2)
    place %= tensors[poisoned].numel()
    tensors[poisoned].view(-1)[place] = value
    row, column = divmod(place, tensors[poisoned].shape[1])
    x, weight, gradient = map(ROW.encode, tensors.values())
    x_t, weight_t, gradient_t = (COLUMN.encode(each.dequantize().t()) for each in (x, weight, gradient))
    forward = decoded_matmul(x, weight, torch.float32)
    dgrad = decoded_matmul(gradient, weight_t, torch.float32)
    wgrad = decoded_matmul(gradient_t, x_t, torch.float32)
    if poisoned == "x":
        depend, others = [forward[row], wgrad[:, column]], dgrad
    elif poisoned == "weight":
        depend, others = [forward[:, row], dgrad[:, column]], wgrad
    else:
        depend, others = [dgrad[row], wgrad[column]], forward
    assert not any(part.isfinite().any() for part in depend) and others.isfinite().all()


def test_zeros_stay_zeros() -> None:
    zeros = ROW.encode(torch.zeros(64, 64))
    assert not zeros.codes.any() and not decoded_matmul(zeros, zeros, torch.float32).any()
    assert ROW.encode(torch.zeros(0, 64)).scale.shape == (0, 2)


def every_amax() -> Tensor:
    """Amaxes whose product with 1 / 448 has all fp32 mantissas near powers of two, and all bf16 numbers."""
    near = torch.arange(-64, 64, dtype=torch.int32)
    powers = torch.arange(1, 255, dtype=torch.int32)[:, None] << 23
    bits = torch.cat([(powers + near).flatten(), (powers + 0x600000 + near).flatten(), near[near > 0]])
    bf16 = torch.arange(1, 0x7F80, dtype=torch.int32) << 16
    return torch.cat([bits[bits > 0], bf16]).view(torch.float32)


def test_scales_are_the_smallest_powers_of_two_that_do_not_saturate() -> None:
    amaxes = every_amax()
    amaxes = amaxes[amaxes.isfinite()]
    found = ROW.encode(torch.nn.functional.pad(amaxes[:, None], (0, 31))).scale.squeeze(1).double().numpy()
    # the product with the reciprocal is rounded, as by the GPU's kernels
    wanted = (amaxes * torch.tensor(1 / 448)).double().numpy()
    expected = np.maximum(np.exp2(np.ceil(np.log2(np.where(wanted == 0, 2.0**-149, wanted)))), 2.0**-127)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_transposes_from_codes_are_those_of_the_numbers(kind: str) -> None:
    """Rounding to four bits commutes with powers of two: only subnormals differ."""
    x = draw(kind, 512, 512)
    row = ROW.encode(x)
    assert row.serves_transpose
    direct, by_codes = (COLUMN.encode(each.contiguous()).dequantize() for each in (x.t(), row.dequantize().t()))
    assert (direct != by_codes).float().mean() <= {"gaussian": 1e-4}.get(kind, 1e-2)
    errors = [float((y - x.t()).norm() / x.norm()) for y in (direct, by_codes)]
    assert abs(errors[0] - errors[1]) < 2e-4


@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_codes_are_the_same_numbers(kind: str) -> None:
    row = ROW.encode(draw(kind, 256, 256))
    assert torch.equal(ROW.encode(row.dequantize()).dequantize(), row.dequantize())


@pytest.mark.parametrize(("kind", "error"), zip(KINDS, (0.0267, 0.0263, 0.0267), strict=True))
def test_errors_are_those_of_the_format(kind: str, error: float) -> None:
    x = draw(kind, 1024, 1024)
    assert float((ROW.encode(x).dequantize() - x).norm() / x.norm()) == pytest.approx(error, rel=0.05)


def test_numbers_are_exact_in_bf16() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127].repeat(244, 1)
    data = torch.nn.functional.pad(codes, (0, 2)).view(torch.float8_e4m3fn)
    scale = torch.arange(3, 247, dtype=torch.uint8)[:, None].repeat(1, 8).view(torch.float8_e8m0fnu)
    numbers = Quantized(data, scale, ROW.spec.block).dequantize()
    assert numbers.isfinite().all() and torch.equal(numbers.bfloat16().float(), numbers)


def test_the_card() -> None:
    facts = RECIPES["mxfp8"].facts
    assert facts["alignment"] == 32 == facts["token_run"] and facts["saves_codes"] and not facts["covers_tokens"]
    assert {facts[operand].element for operand in ("input", "weight", "gradient")} == {"e4m3"}
    assert RECIPES.nearest("MX") == "mxfp8"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_equal_torchaos(kind: str, dtype: torch.dtype) -> None:
    """torchao from its repository: release 0.18 differs in scales of zero and infinity, and next to powers of two."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="pip install torchao")
    if not hasattr(mx, "_f32_to_e8m0_rceil"):
        pytest.skip("pip install --no-deps git+https://github.com/pytorch/ao, which has exact scales")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    powers = torch.empty(1024, 1).uniform_(-38, 30, generator=torch.Generator().manual_seed(1))
    x = (draw(kind, 1024, 1024) * 10.0**powers).to(dtype)
    scale, data = mx.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    ours = ROW.encode(x)
    assert torch.equal(ours.codes, data.view(torch.uint8))
    assert torch.equal(ours.scale.view(torch.uint8), scale.view(torch.uint8))
