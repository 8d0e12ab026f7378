"""The Triton kernel that decodes matrices, run on a CPU by Triton's interpreter, equals torch's
operators bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.catalog.recipes import BLOCK_1D, ROW, ScaleBlock
from megascale.ops.quantized import ElementFormat, Quantized
from tests.ops.interpreter import compile_for_hopper, interpreted

pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")

MODULE = "megascale.ops.decode_blocks"
NVFP4, MXFP8 = (ElementFormat.E2M1, torch.float8_e4m3fn), (ElementFormat.E4M3, torch.float8_e8m0fnu)


@pytest.fixture
def kernels() -> Iterator[Any]:
    with interpreted(MODULE) as module:
        yield module


def matrix(formats: tuple[ElementFormat, torch.dtype], codes: Tensor, scales: Tensor, block: ScaleBlock) -> Quantized:
    element, scale = formats
    return Quantized(codes.view(element.dtype), scales.view(scale), block)


def check(kernels: Any, x: Quantized) -> None:
    found, theirs = kernels.decode(x), x.dequantize().bfloat16()
    assert found.shape == x.shape and found.dtype == torch.bfloat16
    numbers = ~theirs.isnan()
    assert torch.equal(found.isnan(), theirs.isnan())
    assert torch.equal(found.view(torch.int16)[numbers], theirs.view(torch.int16)[numbers])


def test_all_pairs_of_code_and_scale(kernels: Any) -> None:
    """A row for each scale, and in it a block or more of each code."""
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    packed = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
    check(kernels, matrix(NVFP4, packed, scales.expand(256, 32).contiguous(), ScaleBlock(1, 16)))
    check(kernels, matrix(MXFP8, packed, scales.expand(256, 8).contiguous(), ScaleBlock(1, 32)))


def test_decoded_numbers_are_exact() -> None:
    """In bf16, of E8M0 from code 3 to 246."""
    codes = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
    every = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    nvfp4 = matrix(NVFP4, codes, every.expand(256, 32).contiguous(), ScaleBlock(1, 16)).dequantize()
    mxfp8 = matrix(MXFP8, codes, every.expand(256, 8).contiguous(), ScaleBlock(1, 32)).dequantize()[3:247]
    for exact in (nvfp4, mxfp8):
        assert torch.equal(exact.nan_to_num(), exact.bfloat16().float().nan_to_num())
        assert exact.isfinite().float().mean() > 0.99


@pytest.mark.parametrize(("m", "k"), [(48, 320), (16, 32), (80, 544)])
def test_blocks_of_weights_and_ragged_tiles(kernels: Any, m: int, k: int) -> None:
    draw = torch.Generator().manual_seed(m)
    codes = torch.randint(256, (m, k // 2), generator=draw, dtype=torch.uint8)
    scales = torch.randint(126, (m // 16, k // 16), generator=draw, dtype=torch.uint8)
    squares = matrix(NVFP4, codes, scales, ScaleBlock(16, 16))
    check(kernels, squares)
    check(kernels, squares.t())
    rows = torch.randint(126, (m, k // 16), generator=draw, dtype=torch.uint8)
    tokens = matrix(NVFP4, codes.view(m // 4, 4, -1), rows.view(m // 4, 4, -1), ScaleBlock(1, 16))
    check(kernels, tokens)


@pytest.mark.parametrize("block", [ROW, BLOCK_1D])
def test_powers_of_two_of_rows_and_of_parts_of_them(kernels: Any, block: ScaleBlock) -> None:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (48, 640), generator=draw, dtype=torch.uint8)
    exponents = torch.randint(-126, 120, block.grid(48, 640), generator=draw)
    x = Quantized(codes.view(torch.float8_e4m3fn), torch.exp2(exponents.float()), block, requantises=True)
    check(kernels, x)
    assert torch.equal(x.decode().nan_to_num(), x.dequantize().bfloat16().nan_to_num())


def test_the_tensors_scale_is_left_to_the_gemm(kernels: Any) -> None:
    codes = torch.full((16, 16), 0x22, dtype=torch.uint8)
    x = matrix(NVFP4, codes, torch.full((16, 2), 0x38, dtype=torch.uint8), ScaleBlock(1, 16))
    assert torch.equal(kernels.decode(replace(x, tensor_scale=torch.tensor(7.0))), torch.ones(16, 32).bfloat16())


@pytest.mark.parametrize("packed", [True, False])
def test_the_kernel_compiles_for_hopper(packed: bool) -> None:
    types = {"codes": "*u8", "scales": "*u8", "out": "*bf16", "m": "i32", "k": "i32", "blocks": "i32"}
    constants = {
        "PACKED": packed, "E8M0": not packed, "FP32": False, "ROWS": 1, "SIDE": 16 if packed else 32, "HIGH": 16,
        "WIDE": 256,
    }  # fmt: skip
    ptx = compile_for_hopper(MODULE, "_decode", types, constants)
    assert "ld.global.v4" in ptx or "ld.global.v2" in ptx
    assert "st.global.v4" in ptx
