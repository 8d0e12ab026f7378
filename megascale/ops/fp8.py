"""FP8 quantization and GEMM kernels on one device.

    scale = amax(|x|) / fp8_max     data = cast(x * factor), factor = 1 / scale     x ~ data * scale
    a [m, k], b [n, k] -> a b^T [m, n]

`scale` dequantizes, as in `torch._scaled_mm`. Transformer Engine names it `scale_inv`, and names `factor` `scale`.

E4M3 has 3 mantissa bits and reaches 448; E5M2 has 2 and reaches 57,344 (Micikevicius et al. 2022). A scale covers a
tensor, a row, or a block of 128 elements. FP8 tensor cores require k, the dimension of the sum, to be contiguous in
both operands; scales of rows and blocks therefore lie along k.

`Fp8Format`, `ScaleGranularity`, `Quantized`, `TransposedOnly`: formats and quantized matrices.
`amax`, `amax_to_scale`, `scale_and_cast`, `cast_transpose`, `cast_to_fp8`, `cast_stats`: quantization.
`scaled_matmul`: the GEMM. `Fp8Kernels`: the functions that a backend may replace. `TorchFp8`, `CompiledFp8`: backends.
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
from megascale.ops.select import NotByDefault, OpContext

BLOCK = 128
"""Elements along a side of a block with a common scale (DeepSeek-V3, 3.3)."""

MIN_SCALE = 2.0**-126
"""The smallest scale: fp32's smallest normal number."""


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


class ScaleGranularity(Enum):
    """The elements with a common scale: a tensor, a row, BLOCK elements of a row, or BLOCK x BLOCK of a matrix."""

    TENSOR = "tensor"
    ROW = "row"
    BLOCK_1D = "block"
    BLOCK_2D = "square"


@dataclass(frozen=True)
class Quantized:
    """An FP8 matrix: `data` [..., k] times `scale` approximates the original.

    `scale`, fp32, by granularity: TENSOR [], ROW [..., 1], BLOCK_1D [..., k / BLOCK], BLOCK_2D [m / BLOCK, k / BLOCK].
    `use_fast_accum`: as a GEMM's second operand, let tensor cores accumulate in fewer bits than fp32, the fastest mode.
    `transposed`: data of the transpose [k, m] (columnwise data), if the cast wrote both layouts.
    """

    data: Tensor
    scale: Tensor
    granularity: ScaleGranularity
    use_fast_accum: bool = False
    transposed: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def new_empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.data.new_empty(*shape, dtype=dtype)

    def __getitem__(self, rows: slice) -> Quantized:
        """Slice dimension 0."""
        return Quantized(
            self.data[rows],
            self.scale if self.granularity is ScaleGranularity.TENSOR else self.scale[rows],
            self.granularity,
        )

    def t(self) -> Quantized:
        """Transpose a matrix with granularity TENSOR or BLOCK_2D, whose scales hold in both directions."""
        assert self.granularity in (ScaleGranularity.TENSOR, ScaleGranularity.BLOCK_2D), (
            "scales along rows do not hold along columns: quantize the transpose instead"
        )
        data = self.transposed
        if data is None:
            data = self.data.reshape(-1, self.data.shape[-1]).t().contiguous()
        return Quantized(
            data,
            self.scale if self.granularity is ScaleGranularity.TENSOR else self.scale.t().contiguous(),
            self.granularity,
        )

    def dequantize(self) -> Tensor:
        """Return data * scale, an approximation of the original, in fp32."""
        return (
            _scale_groups(self.data.float(), self.granularity) * _broadcast_scale(self.scale, self.granularity)
        ).view(self.shape)


class TransposedOnly(Quantized):
    """A matrix [rows, k] of which only the transpose is stored: `data`, and so `shape`, is [k, rows].

    `t()` returns the transpose as a GEMM operand; every other method needs the rows, which are not there.
    """

    def t(self) -> Quantized:
        return Quantized(self.data, self.scale, self.granularity)


def _scale_groups(x: Tensor, granularity: ScaleGranularity) -> Tensor:
    """Split block dimensions out of x: BLOCK_1D [..., k / BLOCK, BLOCK], BLOCK_2D [m / BLOCK, BLOCK, k / BLOCK, BLOCK].

    x [..., k] is unchanged for TENSOR and ROW.
    """
    if granularity is ScaleGranularity.BLOCK_1D:
        return x.unflatten(-1, (-1, BLOCK))
    if granularity is ScaleGranularity.BLOCK_2D:
        return x.unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    return x


def _broadcast_scale(scale: Tensor, granularity: ScaleGranularity) -> Tensor:
    """View scales in a shape broadcastable to `_scale_groups`."""
    if granularity is ScaleGranularity.BLOCK_2D:
        return scale[:, None, :, None]
    return scale.unsqueeze(-1) if granularity is ScaleGranularity.BLOCK_1D else scale


def amax(x: Tensor, granularity: ScaleGranularity) -> Tensor:
    """Return max |x| by granularity, in fp32 and the shape of `Quantized.scale`. NaN and infinity propagate."""
    magnitude = x.abs()
    if granularity is ScaleGranularity.TENSOR:
        result = magnitude.amax()
    elif granularity is ScaleGranularity.ROW:
        result = magnitude.amax(-1, keepdim=True)
    else:
        result = _scale_groups(magnitude, granularity).amax(-1 if granularity is ScaleGranularity.BLOCK_1D else (1, 3))
    return result.float()


def amax_to_scale(amaxes: Tensor, fp8_format: Fp8Format) -> Tensor:
    """Return the scale amax / fp8_max, at least MIN_SCALE to keep its inverse finite, and 1 for zeros.

    A NaN or infinite amax gives a scale, and hence GEMMs, with NaN or infinity.
    """
    return torch.where(amaxes == 0, 1.0, (amaxes / fp8_format.max_value).clamp(min=MIN_SCALE))


def scale_and_cast(x: Tensor, factor: Tensor, fp8_max: float, dtype: torch.dtype) -> Tensor:
    """Cast x * factor to an FP8 `dtype`, clamped to +-`fp8_max`; `factor`, 1 / scale, broadcasts to x."""
    return (x.float() * factor).clamp(-fp8_max, fp8_max).to(dtype)


def cast_transpose(
    x: Tensor, factor: Tensor, fp8_max: float, dtype: torch.dtype, rowwise: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Implement `CastTranspose` with torch's operators: a pass for the cast and a pass for the transpose."""
    (m, k), (row_blocks, column_blocks) = x.shape, factor.shape
    blocks = x.reshape(row_blocks, m // row_blocks, column_blocks, k // column_blocks)
    data = scale_and_cast(blocks, factor[:, None, :, None], fp8_max, dtype).view(m, k)
    return data if rowwise else None, data.t().contiguous()


def scaled_matmul(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return a b^T for a [..., m, k] and b [n, k]: [..., m, n] in bf16 or fp32, accumulated in fp32."""
    rows = a.data.reshape(-1, a.shape[-1])
    if a.granularity is ScaleGranularity.BLOCK_1D:
        out = _blockwise_mm(rows, b, a.scale.reshape(rows.shape[0], -1), dtype)
    elif ScaleGranularity.TENSOR is a.granularity is b.granularity and not rows.is_cpu:
        out = _scaled_mm(rows, b.data, a.scale, b.scale, dtype, b.use_fast_accum)
    else:  # on CPUs torch's GEMM with tensor scales is a loop, a thousand times slower than with row scales
        out = _scaled_mm(rows, b.data, _column(a.scale, rows), _column(b.scale, b.data).t(), dtype, b.use_fast_accum)
    return out.view(*a.shape[:-1], b.shape[0])


def _scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Call `torch._scaled_mm` with scales of tensors ([], []), rows ([m, 1], [1, n]) or blocks (`_blockwise_mm`)."""
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)


def _blockwise_mm(a: Tensor, b: Quantized, scale_a: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply with block scales; `scale_a` [m, k / BLOCK]."""
    # cuBLAS requires the rows of scales to be aligned to 16 bytes.
    aligned = a.shape[0] % 4 == 0 and (b.granularity is ScaleGranularity.BLOCK_1D or b.scale.shape[1] % 4 == 0)
    multiply = _blockwise_mm_fallback if a.is_cpu or not aligned else _blockwise_mm_cublas
    return multiply(a, b, scale_a, dtype)


def _blockwise_mm_cublas(a: Tensor, b: Quantized, scale_a: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply in one cuBLAS call, which takes 1D block scales outer-dim-major and 2D block scales row-major."""
    scale_b = b.scale.t() if b.granularity is ScaleGranularity.BLOCK_2D else b.scale.t().contiguous()
    return _scaled_mm(a, b.data, scale_a.t().contiguous().t(), scale_b, dtype)


def _blockwise_mm_fallback(a: Tensor, b: Quantized, scale_a: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply with a GEMM per block of k, and sum the results in fp32."""
    scale_b = b.scale.repeat_interleave(BLOCK, 0) if b.granularity is ScaleGranularity.BLOCK_2D else b.scale
    total: Tensor | None = None
    for block in range(a.shape[1] // BLOCK):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        along_a, along_b = (scale[:, block : block + 1].contiguous() for scale in (scale_a, scale_b))
        parts = a[:, columns].contiguous(), b.data[:, columns].contiguous()
        part = _scaled_mm(*parts, along_a, along_b.t(), torch.float32)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(dtype)


def _column(scale: Tensor, rows: Tensor) -> Tensor:
    return scale.reshape(-1, 1).expand(rows.shape[0], 1).contiguous()


ScaleAndCast = Callable[[Tensor, Tensor, float, torch.dtype], Tensor]
"""The signature of `scale_and_cast`."""

CastTranspose = Callable[[Tensor, Tensor, float, torch.dtype, bool], tuple[Tensor | None, Tensor]]
"""`scale_and_cast` of x [m, k] and of its transpose in one pass. factor [m', k'] has an element for every m/m' x k/k'
block of x. Returns rowwise data [m, k], or None if the last argument is False, and columnwise data [k, m].
"""

ScaledMatmul = Callable[[Quantized, Quantized, torch.dtype], Tensor]
"""The signature of `scaled_matmul`."""


@dataclass(frozen=True)
class Fp8Kernels:
    """The functions of an FP8 backend: amax, cast and GEMM.

    `cast_transpose`: None if no kernel writes both layouts; a transpose is then a copy.
    """

    amax: Callable[[Tensor, ScaleGranularity], Tensor] = amax
    scale_and_cast: ScaleAndCast = scale_and_cast
    scaled_matmul: ScaledMatmul = scaled_matmul
    cast_transpose: CastTranspose | None = None

    def transpose_for_cast(self, x: Tensor) -> Tensor:
        """Transpose x [m, k] for `cast_to_fp8`: a view if `cast_transpose` writes the transpose, else a copy."""
        return x.t() if self.cast_transpose else x.t().contiguous()

    def transpose(self, x: Quantized) -> Quantized:
        """Return `x.t()`. Data with a single layout, such as an all-gathered input, goes through `cast_transpose`: FP8
        times a factor of 1 is unchanged.
        """
        if self.cast_transpose is None or x.transposed is not None or x.granularity is not ScaleGranularity.TENSOR:
            return x.t()
        data = x.data.reshape(-1, x.shape[-1])
        one = torch.ones(1, 1, dtype=torch.float32, device=x.data.device)
        _, transposed = self.cast_transpose(data, one, torch.finfo(data.dtype).max, data.dtype, False)
        return Quantized(transposed, x.scale, x.granularity)


class TorchFp8:
    """The backend `torch`: unfused torch operators."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return _unsupported_reason(context)

    def build(self, context: OpContext) -> Fp8Kernels:
        return Fp8Kernels()


class CompiledFp8:
    """The backend `compile`: torch.compile for amax and cast; on a GPU a Triton kernel casts and transposes."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        slow = NotByDefault("compiling delays the first step on a CPU") if context.device.is_cpu else None
        return _unsupported_reason(context) or compiled.compile_unsupported_reason(context.device) or slow

    def build(self, context: OpContext) -> Fp8Kernels:
        if context.device.is_cpu:
            return Fp8Kernels(compiled.compile_function(amax), compiled.compile_function(scale_and_cast))
        from megascale.ops.cast_transpose import cast_transpose

        return Fp8Kernels(
            compiled.compile_function(amax), compiled.compile_function(scale_and_cast), cast_transpose=cast_transpose
        )


def _unsupported_reason(context: OpContext) -> str | None:
    """Say why torch's FP8 GEMMs cannot run on this GPU; None if they can."""
    if context.recipe is None or context.device.is_cpu:
        return None
    capability = context.device.capability
    if capability < (8, 9):
        return "FP8 GEMMs need a GPU of compute capability 8.9 or more"
    if ScaleGranularity(RECIPES[context.recipe].facts["granularity"]) is ScaleGranularity.BLOCK_1D:
        cuda = Version(torch.version.cuda or "0")
        if capability[0] != 9 or cuda < Version("12.9") or Version(torch.__version__) < Version("2.9"):
            return "FP8 GEMMs with block scales need a GPU of compute capability 9, CUDA 12.9 and torch 2.9"
    return None


def cast_to_fp8(
    x: Tensor,
    scale: Tensor,
    fp8_format: Fp8Format,
    granularity: ScaleGranularity,
    kernels: Fp8Kernels = Fp8Kernels(),
    with_transpose: bool = False,
) -> Quantized:
    """Quantize x [..., k], or a view from `Fp8Kernels.transpose_for_cast`. Values beyond the format saturate.

    `with_transpose`: write the transpose too, if `kernels` do so in the same pass.
    """
    fp8_max, dtype = fp8_format.max_value, fp8_format.dtype
    cast_both = kernels.cast_transpose
    if cast_both and x.dim() == 2 and x.stride(1) != 1:
        _, data = cast_both(x.t(), _matrix(1.0 / scale).t(), fp8_max, dtype, False)
        return Quantized(data, scale, granularity)
    if cast_both and with_transpose and granularity in (ScaleGranularity.TENSOR, ScaleGranularity.BLOCK_2D):
        rows, transposed = cast_both(x.reshape(-1, x.shape[-1]), _matrix(1.0 / scale), fp8_max, dtype, True)
        assert rows is not None
        return Quantized(rows.view(x.shape), scale, granularity, transposed=transposed)
    factor = _broadcast_scale(1.0 / scale, granularity)
    data = kernels.scale_and_cast(_scale_groups(x, granularity), factor, fp8_max, dtype)
    return Quantized(data.view(x.shape), scale, granularity)


def _matrix(scale: Tensor) -> Tensor:
    """View scales as a matrix: [1, 1] for a tensor scale."""
    return scale.view(1, 1) if scale.dim() == 0 else scale


def cast_stats(x: Tensor, quantized: Quantized, fp8_format: Fp8Format) -> Tensor:
    """Count elements saturated (beyond fp8_max by more than rounding), underflowed to zero, and in total: f32 [3]."""
    bound = _broadcast_scale(quantized.scale, quantized.granularity) * (fp8_format.max_value * (1 + 2**-8))
    saturated = (_scale_groups(x.abs(), quantized.granularity) > bound).sum()
    underflowed = ((x != 0) & (quantized.data.float() == 0)).sum()
    return torch.stack([saturated, underflowed, torch.full_like(underflowed, x.numel())]).float()
