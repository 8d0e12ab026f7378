"""Triton kernels of casts to FP8: `amax`, and `cast`, which writes the matrix, its transpose, or both.

A kernel sees a matrix [m, k] as it lies in memory; the cast of a view of its transpose is the transpose of its cast.
Scales belong to blocks of HIGH x WIDE elements, where 0 means all rows or all columns. Magnitudes are compared by their
bits: as integers these are in the order of the numbers, with infinity and NaN above all.

Statistics order no other memory access: atomic operations are relaxed. Others wait for all stores of a tile, and empty
the L1 cache.

A kernel is compiled for dtypes, kinds of blocks, and whether m and k are multiples of 16, not for shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megascale.catalog.recipes import ROW, ScaleBlock
from megascale.ops.fp8 import MIN_SCALE, SATURATED, CastRecord
from megascale.ops.known_amax import keep_amax
from megascale.ops.quantized import ElementFormat, Quantized

SIDE = 128  # of a tile, whose FP8 rows and columns are 128 contiguous bytes; blocks of a part of a matrix are no larger
BAND, SPAN = 4, 2048  # rows read twice, the second time from cache, and their columns at a time
WARPS, CAST_WARPS = 8, 16

FORMATS = {ElementFormat.E4M3: tl.float8e4nv, ElementFormat.E5M2: tl.float8e5}
ELEMENTS = ["amax", "record", "counts"]
"""Arguments that may be elements of tensors: kernels are not compiled anew for their addresses."""

SMALLEST, BEYOND = tl.constexpr(MIN_SCALE), tl.constexpr(SATURATED)


class _Matrix(NamedTuple):
    """`data` [m, k], contiguous, whose blocks are `high` x `wide`; `turned`: the cast is of its transpose."""

    data: Tensor
    high: int
    wide: int
    turned: bool

    @classmethod
    def of(cls, x: Tensor, block: ScaleBlock) -> _Matrix:
        high, wide = block.rows or 0, block.k or 0
        assert max(high, wide) <= SIDE
        if x.dim() == 2 and x.t().is_contiguous() and not x.is_contiguous():
            return cls(x.t(), wide, high, True)
        return cls(x.reshape(-1, x.shape[-1]).contiguous(), high, wide, False)

    @property
    def tiles(self) -> tuple[int, int]:
        return triton.cdiv(self.data.shape[0], SIDE), triton.cdiv(self.data.shape[1], SIDE)

    @property
    def scales(self) -> tuple[int, int]:
        """The shape of the scales of `data`."""
        m, k = self.data.shape
        return m // self.high if self.high else 1, k // self.wide if self.wide else 1

    def of_data(self, scale: Tensor) -> Tensor:
        """Return the scales of x as those of `data`."""
        shape = self.scales
        return (scale.reshape(shape[::-1]).t() if self.turned else scale.reshape(shape)).contiguous()

    def of_x(self, scale: Tensor, x: Tensor, block: ScaleBlock) -> Tensor:
        """Return the scales of `data` in the shape of `Quantized.scale`."""
        scale = scale.t() if self.turned else scale
        if block.rows is None:
            return scale.view(())
        return scale if x.dim() == 2 else scale.view(*x.shape[:-1], -1)


def amax(x: Tensor, block: ScaleBlock) -> Tensor:
    """Implement `fp8.amax`."""
    matrix = _Matrix.of(x, block)
    return matrix.of_x(_amax_of(matrix), x, block)


def _amax_of(matrix: _Matrix) -> Tensor:
    out = torch.zeros(matrix.scales, dtype=torch.float32, device=matrix.data.device)
    args = matrix.data, out.view(torch.int32), *matrix.data.shape
    _fp8_amax[matrix.tiles](*args, matrix.high, matrix.wide, SIDE, num_warps=WARPS)
    return out


def cast(
    x: Tensor, expected: Tensor | None, block: ScaleBlock, element: ElementFormat, with_transpose: bool,
    record: CastRecord | None, pow2: bool = False,
) -> Quantized:  # fmt: skip
    """Implement `fp8.Cast`."""
    matrix = _Matrix.of(x, block)
    (m, k), with_rows = matrix.data.shape, not matrix.turned
    with_columns = matrix.turned or (with_transpose and block.serves_transpose)
    rows = x.new_empty(m, k, dtype=element.dtype) if with_rows else None
    columns = x.new_empty(k, m, dtype=element.dtype) if with_columns else None
    scale = x.new_empty(matrix.scales, dtype=torch.float32)
    largest, counts = (None, None) if record is None else (record.amax.view(torch.int32), record.counts)
    by_column = None
    if with_transpose and block == ROW and with_rows:
        by_column = torch.zeros(k, 1, dtype=torch.float32, device=x.device)
        keep_amax(x, columns=by_column)
    columns_bits = None if by_column is None else by_column.view(torch.int32)
    last = largest, counts, columns_bits, m, k, element.max_value, FORMATS[element], pow2
    if expected is None and block == ROW and with_rows:
        _fp8_cast_rows[triton.cdiv(m, BAND),](matrix.data, scale, rows, *last, BAND, SPAN, num_warps=WARPS)
    else:
        blocks = matrix.high, matrix.wide, SIDE
        known = None if expected is None else matrix.of_data(expected)
        if expected is None and not (matrix.high and matrix.wide):  # a tile has parts of blocks
            known = _amax_of(matrix)
        _fp8_cast[matrix.tiles](matrix.data, known, scale, rows, columns, *last, *blocks, num_warps=CAST_WARPS)
    data = columns if rows is None else rows
    assert data is not None
    transposed = None if rows is None else columns
    return Quantized(data.view(x.shape), matrix.of_x(scale, x, block), block, transposed=transposed)


# Triton evaluates annotations when it compiles, and knows none but its own


@triton.jit
def _bits(tile):  # type: ignore[no-untyped-def]
    """Return the bits of |tile|."""
    return tl.abs(tile).to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _scale(bits, largest, POW2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scales of blocks by the bits of their amax."""
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(amax, tl.full(amax.shape, largest, tl.float32)), SMALLEST, tl.PropagateNan.ALL)
    if POW2:
        rounded = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale < float("inf"), rounded, scale)
    return tl.where(amax == 0, 1.0, scale)


@triton.jit
def _inverse(scale):  # type: ignore[no-untyped-def]
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit  # type: ignore[untyped-decorator]
def _codes(tile, factor, largest, FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cast a tile times factors that broadcast to it."""
    scaled = tl.where(tl.abs(tile) == float("inf"), float("nan"), tile * factor)
    return tl.clamp(scaled, -largest, largest, tl.PropagateNan.ALL).to(FP8)


@triton.jit
def _count(counts, tile, scale, codes, inside, largest):  # type: ignore[no-untyped-def]
    """Add to `CastRecord.counts`."""
    saturated = tl.abs(tile) > scale * (largest * BEYOND)
    underflowed = (tile != 0) & ((codes.to(tl.uint8, bitcast=True) & 127) == 0)
    tl.atomic_add(counts, tl.sum(tl.ravel(saturated.to(tl.int32))).to(tl.int64), sem="relaxed")
    tl.atomic_add(counts + 1, tl.sum(tl.ravel(underflowed.to(tl.int32))).to(tl.int64), sem="relaxed")
    tl.atomic_add(counts + 2, tl.sum(tl.ravel(inside.to(tl.int32))).to(tl.int64), sem="relaxed")


@triton.jit
def _raise_columns(by_column, tile, column, k):  # type: ignore[no-untyped-def]
    """Raise the bits of the amax of each column to those of a tile. Few tiles have a larger one: the others only read,
    and an outdated value costs an atomic operation alone.
    """
    bits = tl.max(_bits(tile), 0)
    known = tl.load(by_column + column, mask=column < k, other=0)
    tl.atomic_max(by_column + column, bits, mask=(column < k) & (bits > known), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _block_bits(tile, HIGH: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bits of the amax of each block of a tile."""
    high: tl.constexpr = HIGH if HIGH else SIDE
    wide: tl.constexpr = WIDE if WIDE else SIDE
    return tl.max(tl.max(tl.reshape(_bits(tile), [SIDE // high, high, SIDE // wide, wide]), 3), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _spread(values, HIGH: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Repeat the value of each block for its elements."""
    high: tl.constexpr = HIGH if HIGH else SIDE
    wide: tl.constexpr = WIDE if WIDE else SIDE
    blocks = tl.broadcast_to(values[:, None, :, None], [SIDE // high, high, SIDE // wide, wide])
    return tl.reshape(blocks, [SIDE, SIDE])


@triton.jit  # type: ignore[untyped-decorator]
def _block_places(m, k, HIGH: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the places of the scales of a tile's blocks, and which lie inside the matrix."""
    high: tl.constexpr = SIDE // HIGH if HIGH else 1
    wide: tl.constexpr = SIDE // WIDE if WIDE else 1
    rows, columns = m // HIGH if HIGH else 1, k // WIDE if WIDE else 1
    row = (tl.program_id(0).to(tl.int64) * high if HIGH else 0) + tl.arange(0, high)[:, None]
    column = (tl.program_id(1).to(tl.int64) * wide if WIDE else 0) + tl.arange(0, wide)[None, :]
    return row * columns + column, (row < rows) & (column < columns)


@triton.jit  # type: ignore[untyped-decorator]
def _fp8_amax(  # type: ignore[no-untyped-def]
    x, amax, m, k, HIGH: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr
):
    """Raise the bits of each block's amax, zeros at first, to those of a tile."""
    row = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)[:, None]
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)[None, :]
    tile = tl.load(x + row * k + column, mask=(row < m) & (column < k), other=0.0).to(tl.float32)
    place, exists = _block_places(m, k, HIGH, WIDE, SIDE)
    tl.atomic_max(amax + place, _block_bits(tile, HIGH, WIDE, SIDE), mask=exists, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def cast_tile(  # type: ignore[no-untyped-def] # noqa: PLR0913
    tile, inside, first, end, amax, scale, data, transposed, record, counts, m, k, largest, FP8: tl.constexpr,
    POW2: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Cast a tile of a matrix [m, k] from column `first`, up to column `end`, with the arguments of `_fp8_cast`."""
    row = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)[:, None]
    column = first + tl.arange(0, SIDE)[None, :]
    place, exists = _block_places(m, k, HIGH, WIDE, SIDE)
    if amax is None:
        bits = _block_bits(tile, HIGH, WIDE, SIDE)
    else:
        bits = tl.load(amax + place, mask=exists, other=0.0).to(tl.int32, bitcast=True)
    by_block = _scale(bits, largest, POW2)
    tl.store(scale + place, by_block, mask=exists)
    codes = _codes(tile, _spread(_inverse(by_block), HIGH, WIDE, SIDE), largest, FP8)
    if data is not None:
        tl.store(data + row * k + column, codes, mask=inside)
    if transposed is not None:
        # places made anew: Triton does not see that transposed ones are contiguous, and would store byte by byte
        row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)[None, :]
        column = first.to(tl.int64) + tl.arange(0, SIDE)[:, None]
        tl.store(transposed + column * m + row, tl.trans(codes), mask=(row < m) & (column < end))
    if record is not None:
        tl.atomic_max(record, tl.max(tl.ravel(_bits(tile))), sem="relaxed")
    if counts is not None:
        _count(counts, tile, _spread(by_block, HIGH, WIDE, SIDE), codes, inside, largest)


@triton.jit(do_not_specialize_on_alignment=ELEMENTS)  # type: ignore[untyped-decorator]
def _fp8_cast(  # type: ignore[no-untyped-def] # noqa: PLR0913
    x, amax, scale, data, transposed, record, counts, by_column, m, k, largest, FP8: tl.constexpr,
    POW2: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Cast a tile of x [m, k] with scales by `amax`, or without by the tile itself. Outputs may be None."""
    row = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)[:, None]
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)[None, :]
    inside = (row < m) & (column < k)
    tile = tl.load(x + row * k + column, mask=inside, other=0.0).to(tl.float32)
    cast_tile(
        tile, inside, tl.program_id(1) * SIDE, k, amax, scale, data, transposed, record, counts, m, k, largest, FP8,
        POW2, HIGH, WIDE, SIDE,
    )  # fmt: skip
    if by_column is not None:
        _raise_columns(by_column, tile, tl.program_id(1) * SIDE + tl.arange(0, SIDE), k)


@triton.jit(do_not_specialize_on_alignment=ELEMENTS)  # type: ignore[untyped-decorator]
def _fp8_cast_rows(  # type: ignore[no-untyped-def] # noqa: PLR0913
    x, scale, data, record, counts, by_column, m, k, largest, FP8: tl.constexpr, POW2: tl.constexpr,
    BAND: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Cast whole rows of x [m, k], each with the scale of its own amax."""
    row = tl.program_id(0).to(tl.int64) * BAND + tl.arange(0, BAND)[:, None]
    most = tl.zeros([BAND, 1], tl.int32)
    for start in range(0, k, SPAN):
        column = start + tl.arange(0, SPAN)[None, :]
        tile = tl.load(x + row * k + column, mask=(row < m) & (column < k), other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.max(_bits(tile), 1)[:, None])
    scales = _scale(most, largest, POW2)
    factors = _inverse(scales)
    tl.store(scale + row, scales, mask=row < m)
    if record is not None:
        tl.atomic_max(record, tl.max(tl.ravel(most)), sem="relaxed")
    for start in range(0, k, SPAN):
        column = start + tl.arange(0, SPAN)[None, :]
        inside = (row < m) & (column < k)
        tile = tl.load(x + row * k + column, mask=inside, other=0.0).to(tl.float32)
        codes = _codes(tile, factors, largest, FP8)
        tl.store(data + row * k + column, codes, mask=inside)
        if counts is not None:
            _count(counts, tile, scales, codes, inside, largest)
        if by_column is not None:
            _raise_columns(by_column, tile, start + tl.arange(0, SPAN), k)
