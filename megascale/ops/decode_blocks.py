"""A Triton kernel that decodes E4M3 and E2M1 to bf16: for GEMMs on GPUs that cannot read the codes, and to quantize a
transpose from them.

It reads about a byte of an element, and writes two. A kernel is compiled for formats and blocks, not for shapes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megascale.ops.quantized import ElementFormat, Quantized

HIGH, WIDE = 16, 256  # elements of a tile
WARPS = 4


def decode(x: Quantized) -> Tensor:
    """Implement `Quantized.decode`."""
    if x.data.dtype not in (ElementFormat.E4M3.dtype, ElementFormat.E2M1.dtype):
        return x.decode()
    codes, scales = x.codes.contiguous(), x.scale.contiguous()
    out = codes.new_empty(x.shape, dtype=torch.bfloat16)
    k, m = x.shape[-1], x.shape[:-1].numel()
    narrow, side = scales.itemsize == 1, x.block.k or WIDE
    blocks, formats = scales.shape[-1], (x.packed == 2, x.scale.dtype == torch.float8_e8m0fnu, not narrow)
    tiles = triton.cdiv(m, HIGH), triton.cdiv(k, WIDE)
    scales = scales.view(torch.uint8) if narrow else scales
    _decode[tiles](codes, scales, out, m, k, blocks, *formats, x.block.rows, side, HIGH, WIDE, num_warps=WARPS)
    return out


# Triton evaluates annotations when it compiles, and knows none but its own


@triton.jit
def _of_e2m1(code):  # type: ignore[no-untyped-def]
    magnitude = (code & 7).to(tl.float32)
    magnitude = tl.where(magnitude < 4, magnitude / 2, tl.where(magnitude < 6, magnitude - 2, 2 * magnitude - 8))
    return tl.where(code < 8, 1.0, -1.0) * magnitude  # minus zero, too


@triton.jit
def _of_e4m3(code):  # type: ignore[no-untyped-def]
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _of_e8m0(code):  # type: ignore[no-untyped-def]
    """Return 2^(code - 127), whose smallest is subnormal; 255 is not a number."""
    bits = tl.where(code == 0, 0x400000, code.to(tl.int32) << 23)
    return tl.where(code == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def] # noqa: PLR0913
    codes, scales, out, m, k, blocks, PACKED: tl.constexpr, E8M0: tl.constexpr, FP32: tl.constexpr, ROWS: tl.constexpr,
    SIDE: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Decode a tile of a matrix [m, k] with blocks of ROWS x SIDE, `blocks` in a row; or of one, wider than a tile."""
    row = tl.program_id(0).to(tl.int64) * HIGH + tl.arange(0, HIGH)[:, None]
    first = tl.program_id(1) * WIDE
    if PACKED:
        pair = first // 2 + tl.arange(0, WIDE // 2)[None, :]
        pairs = tl.load(codes + row * (k // 2) + pair, mask=(row < m) & (pair < k // 2), other=0)
        tile = tl.reshape(tl.join(_of_e2m1(pairs & 15), _of_e2m1(pairs >> 4)), [HIGH, WIDE])
    else:
        column = first + tl.arange(0, WIDE)[None, :]
        tile = _of_e4m3(tl.load(codes + row * k + column, mask=(row < m) & (column < k), other=0))
    block = first // (k // blocks) + tl.arange(0, WIDE // SIDE)[None, :]
    scale = tl.load(scales + row // ROWS * blocks + block, mask=(row < m) & (block < blocks), other=0)
    if not FP32:
        scale = _of_e8m0(scale) if E8M0 else _of_e4m3(scale)
    tile = tl.reshape(tl.reshape(tile, [HIGH, WIDE // SIDE, SIDE]) * scale[:, :, None], [HIGH, WIDE])
    column = first + tl.arange(0, WIDE)[None, :]
    tl.store(out + row * k + column, tile.to(tl.bfloat16), mask=(row < m) & (column < k))
