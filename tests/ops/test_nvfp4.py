"""NVFP4 casts: codes and scales byte for byte, those of Transformer Engine's reference among them."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from torch import Tensor

from megascale.catalog.recipes import RECIPES, QuantizerSpec, ScaleBlock
from megascale.ops.nvfp4 import Nvfp4Quantizer
from megascale.ops.philox import philox
from megascale.ops.quantized import Quantized, unpack
from megascale.ops.recipe import Dither, Quantizer, build_recipe

TOKENS, WEIGHTS = ScaleBlock(1, 16), ScaleBlock(16, 16)


def quantizer(block: ScaleBlock = TOKENS, *, rotated: bool = False, stochastic: bool = False) -> Nvfp4Quantizer:
    spec = QuantizerSpec("e2m1", block, scale="nvfp4", rotated=rotated, stochastic=stochastic)
    return Nvfp4Quantizer(spec)


def dither(m: int, k: int) -> Dither:
    return Dither((42, 0), torch.arange(m), torch.arange(k // 16))


def hex_of(x: Tensor) -> str:
    return bytes(x.contiguous().view(torch.uint8).flatten().tolist()).hex()


BLOCKS = [
    ([2688, -1344, 448, 112, 100, -560, 1792, 0], "d702a006", 0x7E, [2688, -1344, 448, 0, 0, -448, 1792, 0]),
    ([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], "07224466", 0x38, [6, 0, 1, 1, 2, 2, 4, 4]),
    ([10, -5, 2.5, 1, 0.4, 7, -8, 0.3], "d713600e", 0x3D, [9.75, -4.875, 2.4375, 0.8125, 0, 6.5, -6.5, 0]),
]
"""The first numbers of a block, whose others are zero; their bytes, the block's scale, and the numbers decoded."""


def test_codes_and_scales_of_a_row() -> None:
    x = torch.zeros(1, 48)
    for index, (numbers, *_) in enumerate(BLOCKS):
        x[0, 16 * index : 16 * index + 8] = torch.tensor(numbers)
    found = quantizer().encode(x)
    assert found.shape == x.shape and found.tensor_scale is not None and found.tensor_scale.item() == 1
    for index, (_, codes, scale, decoded) in enumerate(BLOCKS):
        block = found.columns(slice(16 * index, 16 * index + 16))
        assert hex_of(block.codes) == codes + "00000000"
        assert block.scale.view(torch.uint8).item() == scale
        assert block.dequantize()[0].tolist() == decoded + [0] * 8


def magnitudes(side: int, amax: float, kind: int) -> Tensor:
    """Return numbers [side, side] up to amax: uniform, with outliers in some columns, or of very different sizes."""
    place = torch.arange(side * side).view(side, side)
    zero = torch.zeros_like(place)
    a, b, *_ = philox((place, zero, zero, zero), (kind, 0))
    x = a.double() / 2**31 - 1
    if kind == 1:
        x[:, ::37] *= 50
    if kind == 2:
        x *= (2.0 ** torch.arange(-12, 4).double())[b % 16]
    return (x / x.abs().amax() * amax).bfloat16()


def digest(*results: Quantized) -> str:
    """Hash codes and scales, those of squares once for each row."""
    found = hashlib.sha256()
    for each in results:
        scale = each.scale.view(torch.uint8).repeat_interleave(each.block.rows or 1, 0)
        found.update(each.codes.contiguous().numpy().tobytes() + scale.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


AMAXES = [1e-30, 1e-8, 1.0, 3e4, 1e30]
TE_DIGESTS = {
    (TOKENS, False): "148e4fe38c44792c",
    (TOKENS, True): "e6ced50bdf2de679",
    (WEIGHTS, False): "f4068f4d828eb24c",
}
"""Hashes over 1.5 million elements in all, of `NVFP4QuantizerRef` in Transformer Engine's `reference_nvfp4.py` (commit
d0067d0): rowwise and columnwise data and scales, by block and `with_rht`.
"""


@pytest.mark.parametrize(("block", "rotated"), TE_DIGESTS)
def test_codes_and_scales_are_transformer_engines(block: ScaleBlock, rotated: bool) -> None:
    results = list[Quantized]()
    for amax in AMAXES:
        for kind in range(3):
            x = magnitudes(128, amax, kind)
            row, of_columns = quantizer(block).encode(x), quantizer(block, rotated=rotated)
            results += row, row.t() if block == WEIGHTS else of_columns.encode(of_columns.turned(x))
    assert digest(*results) == TE_DIGESTS[block, rotated]


def test_both_directions_of_a_weight_have_the_same_values() -> None:
    x = magnitudes(64, 1.0, 2)
    rows, columns = quantizer(WEIGHTS).encode(x), quantizer(WEIGHTS).encode(x.t())
    assert torch.equal(rows.dequantize(), columns.dequantize().t())
    assert torch.equal(rows.t().codes, columns.codes) and torch.equal(rows.t().dequantize(), rows.dequantize().t())


def test_a_tensors_amax_may_come_from_elsewhere() -> None:
    """As that of a matrix of which ranks have rows, or blocks along k."""
    x = magnitudes(64, 3.0, 2)
    x[40, 50] = 7
    amax, whole = quantizer().amax(x), quantizer().encode(x)
    assert amax.shape == () and amax.dtype == torch.float32 and amax.item() == 7
    for part, same in ((x[:32], whole[:32]), (x[:, 16:48], whole.columns(slice(16, 48)))):
        found = quantizer().encode(part, amax)
        assert torch.equal(found.codes, same.codes) and torch.equal(found.dequantize(), same.dequantize())
    assert not torch.equal(quantizer().encode(x[:32]).codes, whole[:32].codes)


# Stochastic rounding


def test_stochastic_bits_do_not_depend_on_how_tokens_are_split() -> None:
    x = magnitudes(64, 1.0, 0)
    place, cast = dither(64, 64), quantizer(stochastic=True)
    whole, amax = cast.encode(x, dither=place), cast.amax(x)
    for rows, columns in ((slice(0, 32), slice(0, 64)), (slice(48, 64), slice(0, 64)), (slice(0, 64), slice(16, 48))):
        blocks = place.blocks[columns.start // 16 : columns.stop // 16]
        part = cast.encode(x[rows, columns], amax, dither=Dither(place.key, place.rows[rows], blocks))
        assert torch.equal(part.codes, whole[rows].columns(columns).codes)
    other = cast.encode(x, dither=place._replace(key=(42, 1)))
    assert 0.2 < (other.codes != whole.codes).float().mean() < 0.8
    sequences = cast.encode(x.view(16, 4, 64), dither=place)
    assert sequences.shape == (16, 4, 64) and torch.equal(sequences.codes.view(64, -1), whole.codes)


def test_the_mean_over_steps_is_the_number() -> None:
    """Up to the bias of eight bits, except where a block's scale is rounded down, and its largest elements saturate."""
    x, steps = magnitudes(16, 1.0, 0), 256
    total = torch.zeros(16, 16)
    for step in range(steps):
        found = quantizer(stochastic=True).encode(x, dither=dither(16, 16)._replace(key=(7, step)))
        total += found.dequantize()
    assert found.tensor_scale is not None
    unit = found.scale.float() * found.tensor_scale
    inside = x.float().abs() < 5.9 * unit
    error = (total / steps - x.float()) / unit
    assert inside.float().mean() > 0.8 and error[inside].abs().max() < 5 * 1.0 / math.sqrt(steps)
    assert error[inside].mean().abs() < 0.02


def test_stochastic_rounding_needs_a_place() -> None:
    with pytest.raises(ValueError, match="dither"):
        quantizer(stochastic=True).encode(torch.ones(16, 16))


# Limits


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0), (17, 31), (31, 5)])
@pytest.mark.parametrize("block", [TOKENS, WEIGHTS])
def test_a_number_that_is_not_finite_poisons_the_matrix(bad: float, place: tuple[int, int], block: ScaleBlock) -> None:
    x, other = magnitudes(32, 1.0, 0), quantizer(WEIGHTS).encode(magnitudes(32, 1.0, 1))
    x[place] = bad
    gemm = build_recipe("nvfp4").gemm
    for cast in (quantizer(block), quantizer(block, stochastic=True)):
        for matrix in (x, cast.turned(x)):
            found = cast.encode(matrix, dither=dither(32, 32))
            assert not gemm(found, other, torch.bfloat16).isfinite().any()
            assert not gemm(other, found, torch.float32).isfinite().any()
    if block == TOKENS:
        rotated = quantizer(rotated=True)
        assert not gemm(rotated.encode(rotated.turned(x)), other, torch.float32).isfinite().any()


@pytest.mark.parametrize("block", [TOKENS, WEIGHTS])
def test_zeros_stay_zeros(block: ScaleBlock) -> None:
    """Rows, blocks, and a whole matrix."""
    x = magnitudes(64, 1.0, 0)
    x[:16], x[:, 32:48] = 0, 0
    found = quantizer(block).encode(x)
    assert torch.all(found.dequantize()[x == 0] == 0) and torch.all(unpack(found.data)[:16] == 0)
    nothing = quantizer(block).encode(torch.zeros(32, 32))
    assert not nothing.codes.any() and not nothing.dequantize().any()
    assert nothing.tensor_scale is not None and nothing.tensor_scale.item() == 1
    assert not build_recipe("nvfp4").gemm(nothing, nothing, torch.float32).any()
    empty = quantizer(TOKENS).encode(torch.zeros(0, 32), torch.tensor(1.0))
    assert build_recipe("nvfp4").gemm(empty, nothing, torch.bfloat16).shape == (0, 32)


@pytest.mark.parametrize("amax", [1e-38, 1e-36, 1e-30, 1e30, 3e38])
def test_scales_of_extreme_matrices_are_finite(amax: float) -> None:
    x = magnitudes(32, amax, 0)
    found = quantizer().encode(x)
    assert found.tensor_scale is not None and found.tensor_scale.isfinite() and found.tensor_scale > 0
    relative = (found.dequantize().double() - x.double()).norm() / x.double().norm()
    assert relative < 0.12 if amax > 1e-35 else found.dequantize().isfinite().all()


# Errors


def numbers(kind: str) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(512, 1024, generator=draw)
    if kind == "outlier columns":
        x[:, ::100] *= 50
    if kind == "heavy tail":
        x *= torch.exp(1.5 * torch.randn(512, 1024, generator=draw))
    return x.bfloat16()


ERRORS = {"gaussian": (9.52, 11.1, 13.7), "outlier columns": (6.40, 12.2, 12.3), "heavy tail": (6.29, 15.4, 11.6)}
"""Relative errors in per cent, of rows, of squares, and of stochastic rounding."""


@pytest.mark.parametrize("kind", ERRORS)
def test_relative_errors(kind: str) -> None:
    """A heavy tail's depends on its largest element."""
    x = numbers(kind)
    casts = quantizer(), quantizer(WEIGHTS), quantizer(stochastic=True)
    for cast, expected in zip(casts, ERRORS[kind], strict=True):
        found = cast.encode(x, dither=dither(512, 1024)).dequantize()
        error = 100 * (found - x.float()).norm() / x.float().norm()
        assert error.item() == pytest.approx(expected, rel=0.08 if kind == "heavy tail" else 0.05)


# The recipe


def test_which_operands_are_rotated_and_rounded_stochastically() -> None:
    recipe, facts = build_recipe("nvfp4"), RECIPES["nvfp4"].facts
    assert facts["alignment"] == 32
    found = {
        name + suffix: (each.spec.block.rows, each.spec.rotated, each.spec.stochastic)
        for suffix, quantizers in (("", recipe.rows), ("_column", recipe.columns))
        for name, each in quantizers.items()
    }
    assert found == {
        "input": (1, False, False), "input_column": (1, True, False),
        "weight": (16, False, False), "weight_column": (16, False, False),
        "gradient": (1, False, True), "gradient_column": (1, True, True),
    }  # fmt: skip


def test_gemms_equal_those_of_decoded_matrices_in_fp64() -> None:
    recipe = build_recipe("nvfp4")
    x, w = recipe.rows["input"].encode(magnitudes(256, 3.0, 1)), recipe.rows["weight"].encode(magnitudes(256, 0.1, 0))
    exact = x.dequantize().double() @ w.dequantize().double().t()
    found = recipe.gemm(x, w, torch.float32)
    assert (found - exact).norm() / exact.norm() < 1e-6
    assert torch.equal(recipe.gemm(x, w, torch.bfloat16), found.bfloat16())
    total = torch.full((256, 256), math.nan)
    recipe.wgrad(total, x, w, False)
    recipe.wgrad(total, x, w, True)
    assert (total - 2 * exact).norm() / exact.norm() < 2e-6


def test_a_tensors_scale_sees_later_tokens() -> None:
    """A known limit: the outputs of earlier tokens change, by an amount that depends on where scales lie."""
    recipe, x = build_recipe("nvfp4"), numbers("gaussian")
    weight = recipe.rows["weight"].encode(x[:64])
    before = recipe.gemm(recipe.rows["input"].encode(x), weight, torch.float32)[:256]
    x[256:] *= 7
    after = recipe.gemm(recipe.rows["input"].encode(x), weight, torch.float32)[:256]
    assert 0.02 < (after - before).norm() / before.norm() < 0.1


def test_wgrad_of_rotated_operands_is_that_of_the_operands() -> None:
    """Up to the error of NVFP4."""
    recipe = build_recipe("nvfp4")
    draw = torch.Generator().manual_seed(2)
    grad, x = (torch.randn(512, features, generator=draw).bfloat16() for features in (64, 96))
    operands = []
    for name, each in (("gradient", grad), ("input", x)):
        cast: Quantizer = recipe.columns[name]
        turned = cast.turned(each)
        operands.append(cast.encode(turned, dither=dither(*turned.shape)))
    total = torch.empty(64, 96)
    recipe.wgrad(total, operands[0], operands[1], False)
    exact = grad.double().t() @ x.double()
    assert 0.1 < (total - exact).norm() / exact.norm() < 0.25
