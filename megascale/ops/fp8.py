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
from packaging.version import Version
from torch import Tensor

from megascale.catalog.recipes import RECIPES
from megascale.ops import compiled
from megascale.ops.select import Reluctance, Setting

BLOCK = 128
"""Numbers that share a scale in a block (DeepSeek-V3, 3.3)."""

SMALLEST = 2.0**-126
"""Of scales: fp32's smallest number that is not subnormal."""


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

    `scale`, fp32: [], [..., 1], [..., k / BLOCK] or, of a square grain, [m / BLOCK, k / BLOCK]. `fast`: as a second
    factor, sums may be kept in the fewer bits than fp32's in which tensor cores are fastest. `across`: the data of its
    transpose, where the cast wrote that too.
    """

    data: Tensor
    scale: Tensor
    grain: Grain
    fast: bool = False
    across: Tensor | None = None

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
        data = self.across
        if data is None:
            data = self.data.reshape(-1, self.data.shape[-1]).t().contiguous()
        return Quantized(data, self.scale if self.grain is Grain.TENSOR else self.scale.t().contiguous(), self.grain)

    def dequantized(self) -> Tensor:
        """About the original, in fp32."""
        return (_parts(self.data.float(), self.grain) * _beside(self.scale, self.grain)).view(self.shape)


class Transposed(Quantized):
    """A matrix [rows, k] of which there is only the transpose: `data` [k, rows]."""

    def t(self) -> Quantized:
        return Quantized(self.data, self.scale, self.grain)


def _parts(x: Tensor, grain: Grain) -> Tensor:
    """x [..., k] as a view in which what shares a scale has dimensions of its own."""
    if grain is Grain.SQUARE:
        x = x.unflatten(0, (-1, BLOCK))
    return x.unflatten(-1, (-1, BLOCK)) if grain in (Grain.BLOCK, Grain.SQUARE) else x


def _beside(scale: Tensor, grain: Grain) -> Tensor:
    """Scales in a shape that broadcasts to `_parts`."""
    if grain is Grain.SQUARE:
        return scale[:, None, :, None]
    return scale.unsqueeze(-1) if grain is Grain.BLOCK else scale


def amax(x: Tensor, grain: Grain) -> Tensor:
    """The largest magnitude of x [..., k] in each part that shares a scale, in the shape of `Quantized.scale`, fp32.
    What is not finite shows.
    """
    magnitude = x.abs()
    if grain is Grain.TENSOR:
        found = magnitude.amax()
    elif grain is Grain.ROW:
        found = magnitude.amax(-1, keepdim=True)
    else:
        found = _parts(magnitude, grain).amax(-1 if grain is Grain.BLOCK else (1, 3))
    return found.float()


def scale_of(largest: Tensor, number: Number) -> Tensor:
    """The scale under which `largest` becomes the largest number of a format, or less where the scale's inverse would
    not be finite. 1 for zeros; not finite if `largest` is not, and then every product is not either.
    """
    return torch.where(largest == 0, 1.0, (largest / number.largest).clamp(min=SMALLEST))


def values(x: Tensor, factor: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """x times a factor that broadcasts to it, in 8 bits. What is larger than `largest` becomes it."""
    return (x.float() * factor).clamp(-largest, largest).to(dtype)


def cast_transpose(
    x: Tensor, factor: Tensor, largest: float, dtype: torch.dtype, rows: bool = True
) -> tuple[Tensor | None, Tensor]:
    """See `CastTranspose`: by torch's operators, in a pass for the cast and one for the transpose."""
    (m, k), (high, wide) = x.shape, factor.shape
    parts = x.reshape(high, m // high, wide, k // wide)
    data = values(parts, factor[:, None, :, None], largest, dtype).view(m, k)
    return data if rows else None, data.t().contiguous()


def product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """a [..., m, k] times b [n, k] transposed: [..., m, n] in bf16 or fp32, accumulated in fp32."""
    rows = a.data.reshape(-1, a.shape[-1])
    if a.grain is Grain.BLOCK:
        out = _by_blocks(rows, b, a.scale.reshape(rows.shape[0], -1), dtype)
    elif Grain.TENSOR is a.grain is b.grain and not rows.is_cpu:
        out = _scaled(rows, b.data, a.scale, b.scale, dtype, b.fast)
    else:  # torch's product under one scale is a loop on CPUs, a thousand times slower than the one by rows
        out = _scaled(rows, b.data, _column(a.scale, rows), _column(b.scale, b.data).t(), dtype, b.fast)
    return out.view(*a.shape[:-1], b.shape[0])


def _scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Scales [] both, [m, 1] and [1, n], or, on some GPUs, of blocks, as `_by_blocks` has them."""
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)


def _by_blocks(a: Tensor, b: Quantized, scale_a: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales [m, k / BLOCK] of a."""
    aligned = a.shape[0] % 4 == 0 and (b.grain is Grain.BLOCK or b.scale.shape[1] % 4 == 0)  # to 16 bytes, for cuBLAS
    multiply = _block_by_block if a.is_cpu or not aligned else _blocks_at_once
    return multiply(a, b, scale_a, dtype)


def _blocks_at_once(a: Tensor, b: Quantized, scale_a: Tensor, dtype: torch.dtype) -> Tensor:
    """By cuBLAS, which reads the scales of rows block by block, those of squares as they lie."""
    scale_b = b.scale.t() if b.grain is Grain.SQUARE else b.scale.t().contiguous()
    return _scaled(a, b.data, scale_a.t().contiguous().t(), scale_b, dtype)


def _block_by_block(a: Tensor, b: Quantized, scale_a: Tensor, dtype: torch.dtype) -> Tensor:
    """A product for each block of k, added up in fp32."""
    scale_b = b.scale.repeat_interleave(BLOCK, 0) if b.grain is Grain.SQUARE else b.scale
    total: Tensor | None = None
    for block in range(a.shape[1] // BLOCK):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        along_a, along_b = (scale[:, block : block + 1].contiguous() for scale in (scale_a, scale_b))
        parts = a[:, columns].contiguous(), b.data[:, columns].contiguous()
        part = _scaled(*parts, along_a, along_b.t(), torch.float32)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(dtype)


def _column(scale: Tensor, rows: Tensor) -> Tensor:
    return scale.reshape(-1, 1).expand(rows.shape[0], 1).contiguous()


Values = Callable[[Tensor, Tensor, float, torch.dtype], Tensor]

CastTranspose = Callable[[Tensor, Tensor, float, torch.dtype, bool], tuple[Tensor | None, Tensor]]
"""`values` of x [m, k] and of its transpose in one pass: the numbers of factor [m', k'] are each for one of m' x k'
equal parts of x. Results [m, k], None unless the last argument asks for it, and [k, m].
"""

Product = Callable[[Quantized, Quantized, torch.dtype], Tensor]


@dataclass(frozen=True)
class Kernels:
    """What goes over a matrix that is cast, `amax` and `values`, and the `product` of two that were. `cast_transpose`:
    None where no kernel writes both layouts, and a transpose is a copy.
    """

    amax: Callable[[Tensor, Grain], Tensor] = amax
    values: Values = values
    product: Product = product
    cast_transpose: CastTranspose | None = None

    def turned(self, x: Tensor) -> Tensor:
        """The transpose of x [m, k] for a cast: as it lies for a kernel that writes transposes, else copied."""
        return x.t() if self.cast_transpose else x.t().contiguous()

    def transposed(self, x: Quantized) -> Quantized:
        """`x.t()`. What came in one layout alone, such as from other ranks, goes through the kernel that casts: times
        one, 8 bits stay as they are.
        """
        if self.cast_transpose is None or x.across is not None or x.grain is not Grain.TENSOR:
            return x.t()
        data, one = x.data.reshape(-1, x.shape[-1]), torch.ones(1, 1, device=x.data.device)
        _, across = self.cast_transpose(data, one, torch.finfo(data.dtype).max, data.dtype, False)
        return Quantized(across, x.scale, x.grain)


class TorchLinear:
    """torch's operators, one after the other."""

    def refusal(self, setting: Setting) -> str | None:
        return _unable(setting)

    def build(self, setting: Setting) -> Kernels:
        return Kernels()


class CompiledLinear:
    """A kernel for the largest magnitude, one that casts, and on a GPU one that casts and transposes."""

    def refusal(self, setting: Setting) -> str | None:
        slow = Reluctance("compiling delays the first step on a CPU") if setting.device.is_cpu else None
        return _unable(setting) or compiled.refusal(setting.device) or slow

    def build(self, setting: Setting) -> Kernels:
        if setting.device.is_cpu:
            return Kernels(compiled.fused(amax), compiled.fused(values))
        from megascale.ops.cast_transpose import cast_transpose

        return Kernels(compiled.fused(amax), compiled.fused(values), cast_transpose=cast_transpose)


def _unable(setting: Setting) -> str | None:
    """What torch's products in 8 bits lack on a GPU; None if nothing."""
    if setting.recipe is None or setting.device.is_cpu:
        return None
    capability = setting.device.capability
    if capability < (8, 9):
        return "products in 8 bits need a GPU of compute capability 8.9 or more"
    if Grain(RECIPES[setting.recipe].facts["grain"]) is Grain.BLOCK:
        cuda = Version(torch.version.cuda or "0")
        if capability[0] != 9 or cuda < Version("12.9") or Version(torch.__version__) < Version("2.9"):
            return "products by blocks need a GPU of compute capability 9, CUDA 12.9 and torch 2.9"
    return None


def cast(
    x: Tensor, scale: Tensor, number: Number, grain: Grain, kernels: Kernels = Kernels(), both: bool = False
) -> Quantized:
    """x [..., k] in 8 bits under a scale. What is larger than the format can say becomes its largest number. `both`:
    with its transpose, where that is no pass of its own. x may be what `Kernels.turned` made.
    """
    how = number.largest, number.dtype
    together = kernels.cast_transpose
    if together and x.dim() == 2 and x.stride(1) != 1:
        _, data = together(x.t(), _matrix(1.0 / scale).t(), *how, False)
        return Quantized(data, scale, grain)
    if together and both and grain in (Grain.TENSOR, Grain.SQUARE):
        rows, across = together(x.reshape(-1, x.shape[-1]), _matrix(1.0 / scale), *how, True)
        assert rows is not None
        return Quantized(rows.view(x.shape), scale, grain, across=across)
    data = kernels.values(_parts(x, grain), _beside(1.0 / scale, grain), *how)
    return Quantized(data.view(x.shape), scale, grain)


def _matrix(scale: Tensor) -> Tensor:
    """The scales of a matrix in lines and columns as it has them."""
    return scale.view(1, 1) if scale.dim() == 0 else scale


def lost(x: Tensor, cast: Quantized, number: Number) -> Tensor:
    """How many numbers of x [..., k] a cast made to the format's largest though they are larger by more than its
    rounding, how many it made to zero, and how many there are: f32 [3].
    """
    bound = _beside(cast.scale, cast.grain) * (number.largest * (1 + 2**-8))
    saturated = (_parts(x.abs(), cast.grain) > bound).sum()
    flushed = ((x != 0) & (cast.data.float() == 0)).sum()
    return torch.stack([saturated, flushed, torch.full_like(flushed, x.numel())]).float()
