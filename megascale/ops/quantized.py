"""Quantized matrices: codes of a narrow format, and the scales that turn them back into numbers.

    x ~ data * scale * tensor_scale        a scale holds for a `ScaleBlock` of elements

E4M3 has 3 mantissa bits and reaches 448; E5M2 has 2 and reaches 57,344 (Micikevicius et al. 2022); E2M1 has 1, reaches
6, and is packed in pairs, the element of even index in the low half of a byte. Tensor cores require k, the dimension of
a GEMM's sum, to be contiguous in both operands; blocks therefore count their elements along k.

`ElementFormat`: the formats of elements. `Quantized`: a matrix, its slices and its transpose. `pack`, `unpack`: pairs
of codes. `in_blocks`, `over_blocks`: elements and scales in shapes that broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.catalog.recipes import ScaleBlock


class ElementFormat(Enum):
    """A narrow dtype and its largest finite number."""

    E4M3 = (torch.float8_e4m3fn, 448.0)
    E5M2 = (torch.float8_e5m2, 57_344.0)
    E2M1 = (torch.float4_e2m1fn_x2, 6.0)
    INT8 = (torch.int8, 127.0)

    @property
    def dtype(self) -> torch.dtype:
        return self.value[0]

    @property
    def max_value(self) -> float:
        return self.value[1]


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix [..., k]: `data`, its codes, times `scale`, and times `tensor_scale` if there is one,
    approximates the original.

    `scale`, fp32, E8M0 or E4M3, has an element for each `block`: [] for all elements, [..., k / block.k] for rows or
    parts of them, [m / block.rows, k / block.k] for parts of a matrix [m, k]. `tensor_scale`: f32 [].
    `requantises`: the transpose is quantized from the codes (`QuantizerSpec.requantises`).
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
    tensor_scale: Tensor | None = None
    requantises: bool = False

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix, whatever the layout of its codes."""
        *rows, k = self.data.shape
        k *= self.packed
        return torch.Size([k, *rows] if self.columnwise else [*rows, k])

    @property
    def packed(self) -> int:
        """Elements of a code in `data`."""
        return 2 if self.data.dtype == ElementFormat.E2M1.dtype else 1

    @property
    def serves_transpose(self) -> bool:
        """True if the transpose comes from these codes."""
        return self.block.serves_transpose or self.requantises

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
        assert self.tensor_scale is None, "a matrix with two scales is not saved"
        block, columnwise, requantises = self.block, self.columnwise, self.requantises
        return lambda data, scale: Quantized(data, scale, block, columnwise=columnwise, requantises=requantises)

    @property
    def bytes_of_rows(self) -> Tensor:
        """The codes and the scales of each row beside each other, u8 [..., n], as rows travel one by one."""
        assert self.block.rows == 1 and self.tensor_scale is None, "a row has scales of its own"
        return torch.cat([self.codes, self.scale.contiguous().view(torch.uint8)], -1)

    def new_empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.data.new_empty(*shape, dtype=dtype)

    def gathered(self, codes: Tensor, scale: Tensor) -> Quantized:
        """Return the matrix of the rows of all ranks, by their bytes."""
        data = codes.view(self.data.dtype)
        return Quantized(data, scale, self.block, tensor_scale=self.tensor_scale, requantises=self.requantises)

    def __getitem__(self, rows: slice) -> Quantized:
        """Slice dimension 0, between blocks."""
        assert not self.columnwise, "the codes of the transpose alone have no rows"
        scale = self.scale if self.block.rows is None else self.scale[_in_blocks(rows, self.shape[0], self.block.rows)]
        return replace(self, data=self.data[rows], scale=scale, transposed=None)

    def columns(self, span: slice) -> Quantized:
        """Slice the last dimension, between blocks."""
        k = self.block.k
        scale = self.scale if k is None else self.scale[..., _in_blocks(span, self.shape[-1], k)]
        start, stop, _ = span.indices(self.shape[-1])
        data = self.data[..., start // self.packed : stop // self.packed]
        return replace(self, data=data, scale=scale, transposed=None)

    def t(self) -> Quantized:
        """Transpose a matrix whose scales hold in both directions."""
        assert self.block.serves_transpose, "scales along rows do not hold along columns: quantize the transpose"
        data = self.data if self.columnwise else self.transposed
        if data is None:
            rows = self.data.reshape(-1, self.data.shape[-1])
            data = rows.t().contiguous() if self.packed == 1 else pack(unpack(rows).t())
        return replace(self, data=data, scale=self.scale.t().contiguous(), columnwise=False, transposed=None)

    def without_rows(self) -> Quantized:
        """Keep the codes of the transpose alone, if there are any."""
        if self.transposed is None:
            return self
        return replace(self, data=self.transposed, transposed=None, columnwise=True)

    def dequantize(self) -> Tensor:
        """Return data * scale * tensor_scale, an approximation of the original, in fp32."""
        if self.columnwise:
            return self.t().dequantize().t()
        values = e2m1_values(self.data.device)[unpack(self.data).int()] if self.packed == 2 else self.data.float()
        scaled = (in_blocks(values, self.block) * over_blocks(self.scale.float(), self.block)).view(self.shape)
        return scaled if self.tensor_scale is None else scaled * self.tensor_scale

    def decode(self) -> Tensor:
        """Return data * scale in bf16, without the tensor's: exact if scales are powers of two, or E4M3 of E2M1."""
        if not self.requantises or self.packed == 2:
            return replace(self, tensor_scale=None).dequantize().bfloat16()
        values = in_blocks(self.data.bfloat16(), self.block)
        return values.mul_(over_blocks(self.scale.bfloat16(), self.block)).view(self.shape)


class RowReader(NamedTuple):
    """Reads `Quantized.bytes_of_rows`, u8 [r, `width`]: `codes` bytes of codes of `dtype`, then scales of
    `scale_dtype`.
    """

    width: int
    codes: int
    dtype: torch.dtype
    scale_dtype: torch.dtype
    make: Callable[..., Quantized]

    @classmethod
    def of(cls, x: Quantized) -> RowReader:
        """Return the reader of rows like those of x, of which it keeps none alive."""
        codes = x.codes.shape[-1]
        width = codes + x.scale.shape[-1] * x.scale.element_size()
        return cls(width, codes, x.data.dtype, x.scale.dtype, x.constructor())

    def __call__(self, rows: Tensor) -> Quantized:
        codes, scales = (part.contiguous() for part in rows.split([self.codes, self.width - self.codes], -1))
        return self.make(codes.view(self.dtype), scales.view(self.scale_dtype))


def e2m1_values(device: torch.device) -> Tensor:
    """Return the values [16], f32, of E2M1 by code, computed on the device: a copy to it would hold up the host."""
    codes = torch.arange(16, device=device)
    exponent, fraction = codes >> 1 & 3, codes & 1
    magnitude = (fraction + 2 * (exponent > 0)) * 2 ** exponent.clamp(min=1) / 4
    return torch.where(codes < 8, magnitude, -magnitude)


def unpack(data: Tensor) -> Tensor:
    """Return the codes of packed E2M1 data [..., k / 2], u8 [..., k]."""
    pairs = data.view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """Pack codes, u8 [..., k], in pairs: E2M1 data [..., k / 2]."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).contiguous().view(ElementFormat.E2M1.dtype)


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
