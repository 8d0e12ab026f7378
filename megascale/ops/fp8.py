"""Matrices in eight bits: the cast, which says what it did, and products of what was cast.

e4m3 has three bits of mantissa and reaches 448, e5m2 two and 57,344 (Micikevicius et al. 2022). A matrix is cast after
it is divided by a scale: one for all, one for each row, or one for each block of 128. Products are sums along the last
dimension of both factors, the only form that tensor cores multiply in eight bits, so scales lie along it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from megascale.ops import compiled
from megascale.ops.select import Reluctance, Setting

BLOCK = 128
"""Numbers that share a scale in a block (DeepSeek-V3, 3.3)."""


class Number(Enum):
    """An 8-bit format, and its largest number."""

    E4M3 = (torch.float8_e4m3fn, 448.0)
    E5M2 = (torch.float8_e5m2, 57_344.0)

    @property
    def dtype(self) -> torch.dtype:
        return self.value[0]

    @property
    def largest(self) -> float:
        return self.value[1]


class Grain(Enum):
    """What shares a scale: the whole tensor, a row, or a block of a row (BLOCK numbers) or matrix (BLOCK squared)."""

    TENSOR = "tensor"
    ROW = "row"
    BLOCK = "block"
    SQUARE = "square"


@dataclass(frozen=True)
class Quantized:
    """A matrix in 8 bits: `data` [..., k] times `scale` are about the original.

    `scale`, fp32: [], [..., 1], [..., k / BLOCK] or, of a square grain, [m / BLOCK, k / BLOCK].
    """

    data: Tensor
    scale: Tensor
    grain: Grain

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def new_empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.data.new_empty(*shape, dtype=dtype)

    def __getitem__(self, rows: slice) -> Quantized:
        """Some rows along dimension 0."""
        return Quantized(self.data[rows], self.scale if self.grain is Grain.TENSOR else self.scale[rows], self.grain)

    def t(self) -> Quantized:
        """The transpose of a matrix whose scales are the same in both directions."""
        assert self.grain in (Grain.TENSOR, Grain.SQUARE), "the scales of rows are no scales of columns"
        data = self.data.view(-1, self.data.shape[-1]).t().contiguous()
        return Quantized(data, self.scale if self.grain is Grain.TENSOR else self.scale.t().contiguous(), self.grain)

    def dequantized(self) -> Tensor:
        """About the original, in fp32."""
        scale = self.scale
        if self.grain is Grain.SQUARE:
            scale = scale.repeat_interleave(BLOCK, 0)
        if self.grain in (Grain.BLOCK, Grain.SQUARE):
            scale = scale.repeat_interleave(BLOCK, -1)
        return self.data.float() * scale


def amax(x: Tensor, grain: Grain) -> Tensor:
    """The largest magnitude of x [..., k] in each part that shares a scale, in the shape of `Quantized.scale`, fp32.
    What is not finite shows.
    """
    magnitude = x.abs()
    if grain is Grain.TENSOR:
        found = magnitude.amax()
    elif grain is Grain.ROW:
        found = magnitude.amax(-1, keepdim=True)
    elif grain is Grain.BLOCK:
        found = magnitude.unflatten(-1, (-1, BLOCK)).amax(-1)
    else:
        found = magnitude.unflatten(-1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).amax((1, 3))
    return found.float()


def scale_of(largest: Tensor, number: Number, margin: float = 1.0) -> Tensor:
    """The scale under which `largest` becomes the largest number of a format, divided by `margin`. 1 for zeros; not
    finite if `largest` is not, and then every product is not either.
    """
    scale = largest * (margin / number.largest)
    return torch.where(scale == 0, 1.0, scale)


def values(x: Tensor, factor: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """x times a factor that broadcasts to it, in 8 bits. What is larger than `largest` becomes it."""
    return (x.float() * factor).clamp(-largest, largest).to(dtype)


def product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """a [..., m, k] times b [n, k] transposed: [..., m, n] in bf16 or fp32, accumulated in fp32."""
    rows = a.data.reshape(-1, a.shape[-1])
    if Grain.TENSOR is a.grain is b.grain:
        out = _by_tensors(rows, b.data, a.scale, b.scale, dtype)
    elif a.grain in (Grain.TENSOR, Grain.ROW) and b.grain in (Grain.TENSOR, Grain.ROW):
        out = _by_rows(rows, b.data, _column(a.scale, rows), _column(b.scale, b.data), dtype)
    else:
        out = _by_blocks(rows, b, _blocks(a, rows), dtype)
    return out.view(*a.shape[:-1], b.shape[0])


def _by_tensors(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.is_cpu:  # torch's product under one scale is a loop there, a thousand times slower than the one by rows
        return _by_rows(a, b, _column(scale_a, a), _column(scale_b, b), dtype)
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)


def _by_rows(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales [m, 1] and [n, 1]."""
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=dtype)


def _by_blocks(a: Tensor, b: Quantized, scale_a: Tensor, dtype: torch.dtype) -> Tensor:
    """A product for each block of k, added up in fp32. Scales [m, k / BLOCK] of a."""
    scale_b = b.scale.repeat_interleave(BLOCK, 0) if b.grain is Grain.SQUARE else b.scale
    total: Tensor | None = None
    for block in range(a.shape[1] // BLOCK):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        along_a, along_b = (scale[:, block : block + 1].contiguous() for scale in (scale_a, scale_b))
        parts = a[:, columns].contiguous(), b.data[:, columns].contiguous()
        part = _by_rows(*parts, along_a, along_b, torch.float32)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(dtype)


def _blocks(a: Quantized, rows: Tensor) -> Tensor:
    assert a.grain is Grain.BLOCK, "the first factor has blocks along its rows"
    return a.scale.reshape(rows.shape[0], -1)


def _column(scale: Tensor, rows: Tensor) -> Tensor:
    return scale.reshape(-1, 1).expand(rows.shape[0], 1).contiguous()


Values = Callable[[Tensor, Tensor, float, torch.dtype], Tensor]
Product = Callable[[Quantized, Quantized, torch.dtype], Tensor]


@dataclass(frozen=True)
class Kernels:
    """What goes over a matrix that is cast, `amax` and `values`, and the `product` of two that were."""

    amax: Callable[[Tensor, Grain], Tensor] = amax
    values: Values = values
    product: Product = product


class TorchLinear:
    """torch's operators, one after the other."""

    def refusal(self, setting: Setting) -> str | None:
        return None

    def build(self, setting: Setting) -> Kernels:
        return Kernels()


class CompiledLinear:
    """A kernel for the largest magnitude, and one that casts."""

    def refusal(self, setting: Setting) -> str | None:
        if setting.recipe is None:
            return "casts to fp8, and nothing else"
        slow = Reluctance("compiling delays the first step on a CPU") if setting.device.is_cpu else None
        return compiled.refusal(setting.device) or slow

    def build(self, setting: Setting) -> Kernels:
        return Kernels(compiled.fused(amax), compiled.fused(values))


def cast(x: Tensor, scale: Tensor, number: Number, grain: Grain, kernels: Kernels = Kernels()) -> Quantized:
    """x [..., k] in 8 bits under a scale. What is larger than the format can say becomes its largest number."""
    factor = 1.0 / scale
    if grain is Grain.SQUARE:
        factor = factor.repeat_interleave(BLOCK, 0)
    if grain in (Grain.BLOCK, Grain.SQUARE):
        factor = factor.repeat_interleave(BLOCK, -1)
    return Quantized(kernels.values(x, factor, number.largest, number.dtype), scale, grain)


def lost(x: Tensor, cast: Quantized, number: Number) -> Tensor:
    """How many numbers of x [..., k] a cast made to the format's largest though they are larger by more than its
    rounding, how many it made to zero, and how many there are: f32 [3].
    """
    scale = cast.scale
    if cast.grain is Grain.SQUARE:
        scale = scale.repeat_interleave(BLOCK, 0)
    if cast.grain in (Grain.BLOCK, Grain.SQUARE):
        scale = scale.repeat_interleave(BLOCK, -1)
    saturated = (x.abs() > scale * (number.largest * (1 + 2**-8))).sum()
    flushed = ((x != 0) & (cast.data.float() == 0)).sum()
    return torch.stack([saturated, flushed, torch.full_like(flushed, x.numel())]).float()
