"""The Triton kernels of casts, run on a CPU by Triton's interpreter, equal torch's casts bit for bit."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.catalog.recipes import BLOCK_1D, BLOCK_2D, MX, ROW, TENSOR, QuantizerSpec, ScaleBlock
from megascale.ops import fp8
from megascale.ops.fp8 import CastRecord, Fp8Kernels
from megascale.ops.known_amax import known_column_amax
from megascale.ops.quantized import ElementFormat, Quantized
from megascale.ops.recipe import Quantizer
from tests.ops.interpreter import Launches, compile_for_hopper, interpreted

pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")

MODULE = "megascale.ops.cast_transpose"
BLOCKS = [TENSOR, ROW, BLOCK_1D, BLOCK_2D, ScaleBlock(1, 32)]


@pytest.fixture
def kernels() -> Iterator[Any]:
    with interpreted(MODULE) as module:
        yield module


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Draw numbers of many magnitudes, of which some saturate and others underflow."""
    draw = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=draw) * torch.rand(shape, generator=draw) ** 8).to(dtype)


def record() -> CastRecord:
    return CastRecord(torch.tensor(0.25), torch.arange(1.0, 6, dtype=torch.float64))


def bits(data: Tensor) -> Tensor:
    return data.view(torch.uint8)


def check(
    kernels: Any, x: Tensor, block: ScaleBlock, element: ElementFormat, expected: Tensor | None = None
) -> Quantized:
    """Compare codes, scales, transposes, amaxes, those of columns too, and sums with torch's."""
    given = x.contiguous().clone()
    (ours, our_record), (theirs, their_record) = (
        (cast(each, expected, block, element, True, noted), noted)
        for cast, each, noted in ((kernels.cast, x, record()), (fp8.cast, given, record()))
    )
    assert torch.equal(bits(ours.data), bits(theirs.data)) and ours.data.dtype == element.dtype
    assert ours.data.is_contiguous() and ours.shape == x.shape
    assert torch.equal(ours.scale, theirs.scale)
    assert our_record.amax == their_record.amax and our_record.sums is not None and their_record.sums is not None
    assert torch.equal(our_record.sums[:3], their_record.sums[:3])
    torch.testing.assert_close(our_record.sums, their_record.sums, rtol=1e-6, atol=0)
    assert torch.equal(kernels.amax(x, block), fp8.amax(x.contiguous(), block))
    columns = fp8.amax(x.reshape(-1, x.shape[-1]).t(), ROW) if block == ROW else None
    for kept in (known_column_amax(x) if x.is_contiguous() else columns, known_column_amax(given)):
        assert (kept is None) == (columns is None)
        assert columns is None or torch.equal(kept, columns)  # type: ignore[arg-type]
    if ours.transposed is not None:
        assert torch.equal(bits(ours.transposed), bits(theirs.t().data)) and ours.transposed.is_contiguous()
    assert (ours.transposed is not None) == (block.serves_transpose and x.is_contiguous())
    return ours  # type: ignore[no-any-return]


@pytest.mark.parametrize("element", [ElementFormat.E4M3, ElementFormat.E5M2])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_a_cast_by_its_own_amax_equals_torchs(
    kernels: Any, block: ScaleBlock, element: ElementFormat, turned: bool
) -> None:
    x = numbers(128, 256) if turned else numbers(256, 128)
    check(kernels, x.t() if turned else x, block, element)


@pytest.mark.parametrize("block", [TENSOR, ROW], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_a_cast_by_an_expected_amax_equals_torchs(kernels: Any, block: ScaleBlock, turned: bool) -> None:
    """As of an all-reduce or a history; elements beyond it saturate, and are counted."""
    x = numbers(130, 64, dtype=torch.float32)
    x = x.t() if turned else x
    amax = fp8.amax(x.contiguous(), block) / 2
    cast = check(kernels, x, block, ElementFormat.E4M3, amax)
    assert cast.data.float().abs().amax() == 448


@pytest.mark.parametrize("block", [TENSOR, ROW, ScaleBlock(1, 32)], ids=str)
@pytest.mark.parametrize("shape", [(150, 96), (3, 5, 32), (1, 2080)])
def test_sides_need_not_be_multiples_of_a_tile(kernels: Any, block: ScaleBlock, shape: tuple[int, ...]) -> None:
    check(kernels, numbers(*shape), block, ElementFormat.E5M2)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("block", [TENSOR, ROW, BLOCK_1D], ids=str)
@pytest.mark.parametrize("expected", [None, 0.5])
def test_what_is_not_finite_becomes_nan(kernels: Any, block: ScaleBlock, value: float, expected: float | None) -> None:
    x = numbers(8, 128, dtype=torch.float32)
    x[3, 5] = value
    amax = fp8.amax(x, block)
    given = None if expected is None else torch.full_like(amax, expected)
    noted = record()
    ours = kernels.cast(x, given, block, ElementFormat.E4M3, True, noted)
    columns = known_column_amax(x)
    assert columns is None or (not columns[5].isfinite() and columns.isfinite().sum() == 127)
    theirs = fp8.cast(x, given, block, ElementFormat.E4M3, False, None)
    torch.testing.assert_close(ours.data.float(), theirs.data.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(kernels.amax(x, block), amax, rtol=0, atol=0, equal_nan=True)
    assert ours.data[3, 5].float().isnan() and not noted.amax.isfinite()


def test_amaxes_of_columns_hold_until_their_tensor_is_changed(kernels: Any) -> None:
    x = numbers(8, 128)
    kernels.cast(x, None, ROW, ElementFormat.E4M3, True, None)
    assert known_column_amax(x) is not None and known_column_amax(x.view(8, 128)) is None
    x.mul_(2)
    assert known_column_amax(x) is None


def test_zeros_and_tiny_numbers(kernels: Any) -> None:
    for size in (0.0, 1e-36, 1e-45):
        check(kernels, torch.full((2, 128), size), ROW, ElementFormat.E4M3)


@pytest.mark.parametrize("element", [ElementFormat.E4M3, ElementFormat.E5M2])
def test_fp8_data_is_transposed_unchanged(kernels: Any, element: ElementFormat) -> None:
    x = numbers(130, 64, dtype=torch.float32).to(element.dtype)
    quantizer = Quantizer(
        QuantizerSpec(element.name.lower(), TENSOR), Fp8Kernels(kernels.amax, kernels.cast, strided=True)
    )
    transposed = quantizer.transpose(Quantized(x, torch.tensor(3.0), TENSOR))
    assert torch.equal(bits(transposed.data), bits(x.t().contiguous())) and transposed.scale == 3


@pytest.mark.parametrize("block", [TENSOR, ROW, BLOCK_1D], ids=str)
@pytest.mark.parametrize("fp8_type", ["fp8e4nv", "fp8e5"])
@pytest.mark.parametrize("sums", [False, True])
def test_a_cast_compiles_for_hopper(block: ScaleBlock, fp8_type: str, sums: bool) -> None:
    """Both layouts move in vectors."""
    types = {"x": "*bf16", "scale": "*fp32", "data": f"*{fp8_type}", "transposed": f"*{fp8_type}", "record": "*i32"}
    types |= {"m": "i32", "k": "i32", "largest": "fp32"} | ({"sums": "*fp64"} if sums else {})
    types |= {"by_column": "*i32"} if block == ROW else {}
    types |= {} if block == BLOCK_1D else {"amax": "*fp32"}
    sides = {"HIGH": block.rows or 0, "WIDE": block.k or 0, "SIDE": 128}
    assembly = compile_for_hopper(MODULE, "_fp8_cast", types, {"FP8": fp8_type, **sides}, 16)
    assert {"fp8e4nv": ".e4m3x2", "fp8e5": ".e5m2x2"}[fp8_type] in assembly, "casts pairs to this format"
    assert "ld.global.v4" in assembly and "st.global.v4" in assembly
    assert "ld.global.b16" not in assembly and "st.global.b8" not in assembly and "acq_rel" not in assembly


def test_powers_of_two_in_a_byte_compile_for_hopper() -> None:
    types = {"x": "*bf16", "scale": "*u8", "data": "*fp8e4nv", "m": "i32", "k": "i32", "largest": "fp32"}
    constants = {"FP8": "fp8e4nv", "SCALE": "e8m0", "HIGH": 1, "WIDE": 32, "SIDE": 128}
    assembly = compile_for_hopper(MODULE, "_fp8_cast", types, constants, 16)
    assert ".e4m3x2" in assembly and assembly.count("div.rn") == 1, "one of the largest number, none of scales"
    assert "mul.ftz" not in assembly and "mul.f32" in assembly


def test_amaxes_and_whole_rows_compile_for_hopper() -> None:
    """Statistics order no other memory access."""
    sizes = {"m": "i32", "k": "i32"}
    for high, wide in ((0, 0), (0, 1), (1, 128)):
        types = {"x": "*bf16", "amax": "*i32"} | sizes
        assembly = compile_for_hopper(MODULE, "_fp8_amax", types, {"HIGH": high, "WIDE": wide, "SIDE": 128}, 8)
        assert "atom.global.gpu.relaxed.max.s32" in assembly
    types = {"x": "*bf16", "scale": "*fp32", "data": "*fp8e4nv", "record": "*i32", "sums": "*fp64", "largest": "fp32"}
    constants = {"FP8": "fp8e4nv", "BAND": 4, "SPAN": 2048}
    for more in ({}, {"by_column": "*i32"}):
        assembly = compile_for_hopper(MODULE, "_fp8_cast_rows", types | sizes | more, constants, 8)
        assert "atom.global.gpu.relaxed.max.s32" in assembly and "acq_rel" not in assembly


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launches]:
    """The launches of every kernel of casts."""
    module = importlib.import_module(MODULE)
    found = [Launches(getattr(module, name)) for name in ("_fp8_amax", "_fp8_cast", "_fp8_cast_rows")]
    for each in found:
        monkeypatch.setattr(module, each.kernel.__name__, each)
    return found


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_kernels_are_not_compiled_for_shapes(launches: list[Launches], block: ScaleBlock, turned: bool) -> None:
    from megascale.ops.cast_transpose import cast

    for m, k in ((256, 128), (384, 1152), (128, 640)):
        cast(torch.zeros(k, m).t() if turned else torch.zeros(m, k), None, block, ElementFormat.E4M3, True, None)
    assert [len(set(each.found)) for each in launches] == [min(1, len(each.found)) for each in launches]
    assert any(each.found for each in launches)


@pytest.mark.parametrize("block", [TENSOR, ROW], ids=str)
def test_kernels_are_not_compiled_for_places_of_statistics(launches: list[Launches], block: ScaleBlock) -> None:
    """Which are elements of tensors, as are amaxes of a history."""
    from megascale.ops.cast_transpose import cast

    x, amaxes, sums = torch.zeros(128, 64), torch.zeros(4), torch.zeros(4, 5, dtype=torch.float64)
    for place in range(4):
        expected = amaxes[place] if block == TENSOR else None
        cast(x, expected, block, ElementFormat.E4M3, True, CastRecord(amaxes[place], sums[place]))
    assert sorted((len(each.found), len(set(each.found))) for each in launches) == [(0, 0), (0, 0), (4, 1)]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_powers_of_two_in_a_byte_equal_torchs(kernels: Any, turned: bool, known: bool) -> None:
    """From the largest numbers to the smallest, zero and what is not finite."""
    powers = torch.arange(-149, 128).repeat(2)[:512].float()
    x = numbers(512, 96, dtype=torch.float32)
    x[: len(powers)] *= torch.exp2(powers)[:, None] * 3.99
    x[8], x[9, 40], x[10, 70], x[11, 0] = 0, math.inf, math.nan, 3.3895e38
    given = x.t().contiguous().t() if turned else x
    amax = fp8.amax(x, MX) if known else None
    (ours, our_record), (theirs, their_record) = (
        (cast(each, amax, MX, ElementFormat.E4M3, True, noted, "e8m0"), noted)
        for cast, each, noted in ((kernels.cast, given, record()), (fp8.cast, x, record()))
    )
    assert ours.scale.dtype == theirs.scale.dtype == torch.float8_e8m0fnu
    scales = bits(theirs.scale)
    assert torch.equal(bits(ours.scale), scales) and scales.min() == 0 and scales[scales < 255].max() == 247
    finite = (scales < 255).repeat_interleave(32, 1)
    assert torch.equal(bits(ours.data)[finite], bits(theirs.data)[finite])
    assert ours.data.float()[~finite].isnan().all() and theirs.data.float()[~finite].isnan().all()
    torch.testing.assert_close(our_record.sums, their_record.sums, rtol=1e-6, atol=0, equal_nan=True)
