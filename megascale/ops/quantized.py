"""Quantized matrices: codes of a narrow format, and the scales that turn them back into numbers.

    x ~ data * scale        a scale holds for a `ScaleBlock` of elements, and is fp32

E4M3 has 3 mantissa bits and reaches 448; E5M2 has 2 and reaches 57,344 (Micikevicius et al. 2022). Tensor cores require
k, the dimension of a GEMM's sum, to be contiguous in both operands; blocks therefore count their elements along k.

`Fp8Format`: the formats of elements. `Quantized`: a matrix, its slices and its transpose. `in_blocks`, `over_blocks`:
elements and scales in shapes that broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from megascale.catalog.recipes import ScaleBlock


class Fp8Format(Enum):
    """An FP8 dtype and its largest finite number."""

    E4M3 = (torch.float8_e4m3fn, 448.0)
    E5M2 = (torch.float8_e5m2, 57_344.0)

    @property
    def dtype(self) -> torch.dtype:
        return self.value[0]

    @property
    def max_value(self) -> float:
        return self.value[1]


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix [..., k]: `data`, its codes, times `scale` approximates the original.

    `scale`, fp32, has an element for each `block`: [] for all elements, [..., k / block.k] for rows or parts of them,
    [m / block.rows, k / block.k] for parts of a matrix [m, k].
    `columnwise`: the codes are those of the transpose alone, [k, rows]; `t` is then the only way to use the matrix.
    `transposed`: codes of the transpose beside `data`, if the cast wrote both.
    `use_fast_accum`: as a GEMM's second operand, let tensor cores accumulate in fewer bits than fp32, the fastest mode.
    """

    data: Tensor
    scale: Tensor
    block: ScaleBlock
    use_fast_accum: bool = False
    columnwise: bool = False
    transposed: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix, whatever the layout of its codes."""
        return self.data.t().shape if self.columnwise else self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def codes(self) -> Tensor:
        """The codes as bytes, as they travel between ranks."""
        return self.data.view(torch.uint8)

    @property
    def scales_differ_by_row(self) -> bool:
        """False if one scale holds for all rows, those of other ranks too."""
        return self.block.rows is not None

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The codes and the scales, from which `constructor` makes an equal matrix."""
        return self.data, self.scale

    def constructor(self) -> Callable[..., Quantized]:
        """Return a function from `tensors` to the matrix, which keeps none of them alive."""
        block, columnwise = self.block, self.columnwise
        return lambda data, scale: Quantized(data, scale, block, columnwise=columnwise)

    def new_empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.data.new_empty(*shape, dtype=dtype)

    def gathered(self, codes: Tensor, scale: Tensor) -> Quantized:
        """Return the matrix of the rows of all ranks, by their bytes."""
        return Quantized(codes.view(self.data.dtype), scale, self.block)

    def __getitem__(self, rows: slice) -> Quantized:
        """Slice dimension 0, between blocks."""
        assert not self.columnwise, "the codes of the transpose alone have no rows"
        scale = self.scale if self.block.rows is None else self.scale[_in_blocks(rows, self.shape[0], self.block.rows)]
        return replace(self, data=self.data[rows], scale=scale, transposed=None)

    def columns(self, span: slice) -> Quantized:
        """Slice the last dimension, between blocks."""
        k = self.block.k
        scale = self.scale if k is None else self.scale[..., _in_blocks(span, self.shape[-1], k)]
        return replace(self, data=self.data[..., span], scale=scale, transposed=None)

    def t(self) -> Quantized:
        """Transpose a matrix whose scales hold in both directions."""
        assert self.block.serves_transpose, "scales along rows do not hold along columns: quantize the transpose"
        data = self.data if self.columnwise else self.transposed
        if data is None:
            data = self.data.reshape(-1, self.data.shape[-1]).t().contiguous()
        return Quantized(data, self.scale.t().contiguous(), self.block)

    def without_rows(self) -> Quantized:
        """Keep the codes of the transpose alone, if there are any."""
        if self.transposed is None:
            return self
        return Quantized(self.transposed, self.scale, self.block, columnwise=True)

    def dequantize(self) -> Tensor:
        """Return data * scale, an approximation of the original, in fp32."""
        if self.columnwise:
            return self.t().dequantize().t()
        return (in_blocks(self.data.float(), self.block) * over_blocks(self.scale, self.block)).view(self.shape)


def _in_blocks(span: slice, length: int, side: int) -> slice:
    """Return the blocks of `side` elements that a slice of `length` elements covers."""
    start, stop, _ = span.indices(length)
    assert start % side == 0 and (stop % side == 0 or stop == length), "a slice does not cut a block"
    return slice(start // side, -(-stop // side))


def in_blocks(x: Tensor, block: ScaleBlock) -> Tensor:
    """View x [..., k] with dimensions for blocks: [..., k / block.k, block.k], or for blocks of several rows
    [m / block.rows, block.rows, k / block.k, block.k]. A block of all elements leaves x as it is.
    """
    if block.rows is None:
        return x
    x = x.unflatten(-1, (-1, block.k or x.shape[-1]))
    return x if block.rows == 1 else x.unflatten(0, (-1, block.rows))


def over_blocks(scale: Tensor, block: ScaleBlock) -> Tensor:
    """View scales in a shape that broadcasts to `in_blocks`."""
    if block.rows is None:
        return scale
    return scale.unsqueeze(-1) if block.rows == 1 else scale[:, None, :, None]
