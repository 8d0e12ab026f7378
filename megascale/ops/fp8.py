"""FP8 casts and GEMMs on one device, in torch's operators, and the backends that run them.

    scale = amax(|x|) / largest        data = cast(x * factor), factor = 1 / scale        x ~ data * scale
    a [m, k], b [n, k] -> a b^T [m, n]

`amax`, `cast`, `scaled_matmul`, `scaled_wgrad`: the operations. `Fp8Kernels`: those of a backend. `TorchFp8`,
`TritonFp8`: backends. Quantizers (`ops.recipe`) choose what is cast, and with which scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from megascale.catalog.recipes import RECIPES, ROW, TENSOR, QuantizerSpec, ScaleBlock
from megascale.ops import compiled
from megascale.ops.known_amax import keep_amax
from megascale.ops.quantized import ElementFormat, Quantized, in_blocks, over_blocks
from megascale.ops.select import OpContext
from megascale.ops.wgrad import write

MIN_SCALE = 2.0**-126  # the smallest scale: fp32's smallest normal number
ALIGNED_SCALES = 4  # cuBLAS requires the rows of scales to be aligned to 16 bytes
SATURATED = 1 + 2**-8  # times the largest: elements beyond are saturated, by more than rounding


class CastRecord(NamedTuple):
    """The statistics of a step to which a cast adds: `amax`, f32 [], is raised to the largest magnitude; `sums`,
    f64 [5], or None: elements saturated (beyond the largest by more than rounding), underflowed to zero, and in total;
    the sums of their squares and of their fourth powers.
    """

    amax: Tensor
    sums: Tensor | None = None


def amax(x: Tensor, block: ScaleBlock) -> Tensor:
    """Return max |x| for each block, in fp32 and the shape of `Quantized.scale`. NaN and infinity propagate."""
    magnitude = in_blocks(x.abs(), block)
    if block.rows is None:
        return magnitude.amax().float()
    return magnitude.amax(-1 if block.rows == 1 else (1, 3)).float()


def scales_of(amaxes: Tensor, element: ElementFormat, scale: str = "fp32") -> Tensor:
    """Return the scales by the amaxes of their blocks, in the format `scale` (`catalog.recipes`): in fp32 at least
    MIN_SCALE, to keep the inverse finite; not a number if the amax is not.
    """
    if scale == "e8m0":
        return e8m0_scales(amaxes, element)
    scales = torch.where(amaxes == 0, 1.0, (amaxes / element.max_value).clamp(min=MIN_SCALE))
    return round_up_to_pow2(scales) if scale == "pow2" else scales


def round_up_to_pow2(scales: Tensor) -> Tensor:
    """Round positive normal numbers, f32, up to powers of two; infinity and what is not a number stay."""
    bits = scales.view(torch.int32)
    rounded = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(scales.isfinite(), rounded, scales)


def e8m0_scales(amaxes: Tensor, element: ElementFormat) -> Tensor:
    """Return the scales of the OCP's Microscaling formats, exponents biased by 127 (255: not a number), of amaxes, f32.
    They are rounded up, as by NVIDIA's PTX (cvt.rp.satfinite.ue8m0x2) but for infinity, so that no element saturates:
    trained so, E4M3 serves all operands, gradients too (Mishra et al. 2025). The specification rounds down.
    """
    bits = (amaxes * (1 / element.max_value)).view(torch.int32)
    codes = torch.where(bits > 0x400000, (bits + 0x7FFFFF) >> 23, 0)  # code 0 is 2^-127, a subnormal number of fp32
    return torch.where(amaxes.isfinite(), codes, 255).to(torch.uint8).view(torch.float8_e8m0fnu)


def cast(
    x: Tensor, expected: Tensor | None, block: ScaleBlock, element: ElementFormat, with_transpose: bool,
    record: CastRecord | None, scale: str = "fp32",
) -> Quantized:  # fmt: skip
    """Implement `Cast` with torch's operators. The transpose is left to `Quantized.t`."""
    if with_transpose and block == ROW:
        keep_amax(x, columns=amax(x.reshape(-1, x.shape[-1]).t(), ROW))
    largest = amax(x, block) if expected is None else expected
    scales = scales_of(largest, element, scale)
    wide = in_blocks(x, block).to(torch.float32, copy=True)
    if expected is not None:  # else an infinity has the factor zero
        wide.nan_to_num_(torch.nan, torch.nan, torch.nan)
    codes = wide.mul_(over_blocks(1.0 / scales.float(), block)).clamp_(-element.max_value, element.max_value)
    quantized = Quantized(codes.to(element.dtype).view(x.shape), scales, block)
    if record is not None:
        note(record, x, quantized, element, x.abs().amax() if expected is not None else largest)
    return quantized


def note(record: CastRecord, x: Tensor, quantized: Quantized, element: ElementFormat, amax: Tensor) -> None:
    """Add the statistics of a cast of x to `record`. `amax`: of x, or of its blocks."""
    torch.maximum(record.amax, amax.amax().float(), out=record.amax)
    if record.sums is None:
        return
    scale = over_blocks(quantized.scale.float(), quantized.block)
    scale = scale if quantized.tensor_scale is None else scale * quantized.tensor_scale
    saturated = (in_blocks(x.abs(), quantized.block).float() > scale * (element.max_value * SATURATED)).sum()
    underflowed = ((x != 0) & (quantized.dequantize() == 0)).sum()
    total = torch.full_like(underflowed, x.numel())
    record.sums.add_(torch.cat([torch.stack([saturated, underflowed, total]).double(), moments(x)]))


def moments(x: Tensor) -> Tensor:
    """Return the sums of the squares and of the fourth powers, f64 [2]. Powers are of x over its amax: fp32 holds them
    for any x.
    """
    unit = x.abs().amax().float().clamp(MIN_SCALE, 1 / MIN_SCALE)
    squares = (x.float() / unit).square_()
    second, fourth = squares.sum(dtype=torch.float64), squares.square_().sum(dtype=torch.float64)
    return torch.stack([second * unit.double() ** 2, fourth * unit.double() ** 4])


def scaled_matmul(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return a b^T for a [..., m, k] and b [n, k]: [..., m, n] in bf16 or fp32, accumulated in fp32."""
    rows = a.data.reshape(-1, a.shape[-1])
    if a.block.k is not None:
        out = _blockwise_mm(Quantized(rows, a.scale.reshape(rows.shape[0], -1), a.block), b, dtype)
    elif TENSOR == a.block == b.block and not rows.is_cpu:
        out = _scaled_mm(rows, b.data, a.scale, b.scale, dtype, b.use_fast_accum)
    else:  # on CPUs torch's GEMM with tensor scales is a loop, a thousand times slower than with row scales
        out = _scaled_mm(rows, b.data, _row_scales(a), _row_scales(b).t(), dtype, b.use_fast_accum)
    return out.view(*a.shape[:-1], b.shape[0])


def _scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Call `torch._scaled_mm` with scales of tensors ([], []), rows ([m, 1], [1, n]) or blocks (`_blockwise_mm`)."""
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)


def _blockwise_mm(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Multiply matrices whose scales change along k: on a GPU in the same way for any number of rows of a."""
    aligned = b.block.rows == 1 or b.scale.shape[1] % ALIGNED_SCALES == 0
    return (_blockwise_mm_fallback if a.data.is_cpu or not aligned else _blockwise_mm_cublas)(a, b, dtype)


def _blockwise_mm_cublas(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Multiply in one cuBLAS call, which takes scales of parts of rows outer-dim-major and of squares row-major."""
    scale_b, rows = b.scale.t().contiguous() if b.block.rows == 1 else b.scale.t(), a.shape[0]
    if missing := -rows % ALIGNED_SCALES:  # as the rows of an expert
        a = a.gathered(*(torch.cat([part, part.new_zeros(missing, part.shape[1])]) for part in (a.codes, a.scale)))
    return _scaled_mm(a.data, b.data, a.scale.t().contiguous().t(), scale_b, dtype)[:rows]


def _blockwise_mm_fallback(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Multiply with a GEMM per block of k, and sum the results in fp32."""
    total, k, side = None, a.shape[-1], a.block.k
    assert side is not None
    for start in range(0, k, side):
        left, right = (x.columns(slice(start, start + side)) for x in (a, b))
        data = left.data.contiguous(), right.data.contiguous()
        part = _scaled_mm(*data, _row_scales(left), _row_scales(right).t(), torch.float32)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(dtype)


def _row_scales(x: Quantized) -> Tensor:
    """Return a scale for each row [rows, 1] of a matrix whose scales do not change along k."""
    scale, rows = x.scale.reshape(-1), x.shape[:-1].numel()
    return (scale.contiguous() if len(scale) == rows else scale.repeat_interleave(rows // len(scale))).unsqueeze(1)


def scaled_wgrad(total: Tensor, a: Quantized, b: Quantized, add: bool) -> None:
    """Implement `ScaledWgrad` with torch's GEMM, which cannot accumulate, and an addition."""
    # with row scales torch's GEMM returns fp32 on some GPUs only
    write(total, scaled_matmul(a, b, torch.bfloat16 if a.block == ROW and not total.is_cpu else torch.float32), add)


class Cast(Protocol):
    """The cast of a matrix to FP8. Values beyond the format saturate, but infinity becomes NaN."""

    def __call__(
        self, x: Tensor, expected: Tensor | None, block: ScaleBlock, element: ElementFormat, with_transpose: bool,
        record: CastRecord | None, scale: str = "fp32", /,
    ) -> Quantized:  # fmt: skip
        """Quantize x [..., k], also a view of a transpose if the kernels read `strided` matrices.

        `expected`: the amax from which each scale comes, in the shape of `Quantized.scale`; None: x's own.
        `with_transpose`: write the transpose too, if the kernels do so in the same pass. Scales of rows do not serve
        it: instead the amaxes of columns, its rows, are kept with x (`known_amax`). `scale`: the format of scales.
        """


ScaledMatmul = Callable[[Quantized, Quantized, torch.dtype], Tensor]
"""The signature of `scaled_matmul`."""

ScaledWgrad = Callable[[Tensor, Quantized, Quantized, bool], None]
"""`scaled_wgrad(total, a, b, add)`: total [m, n] = a b^T (+ total if `add`; otherwise total is not read) for a [m, k]
and b [n, k]. total is contiguous and has the dtype of main gradients.
"""


@dataclass(frozen=True)
class Fp8Kernels:
    """The functions of an FP8 backend. `strided`: `amax` and `cast` read a view of a transpose as it lies in memory,
    and `cast` writes both layouts; otherwise a transpose is a copy. `capability`: of the GPU, by which recipes choose
    their GEMM; (0, 0) of a CPU. `decode`: `Quantized.decode`.
    """

    amax: Callable[[Tensor, ScaleBlock], Tensor] = amax
    cast: Cast = cast
    scaled_matmul: ScaledMatmul = scaled_matmul
    scaled_wgrad: ScaledWgrad = scaled_wgrad
    strided: bool = False
    capability: tuple[int, int] = (0, 0)
    decode: Callable[[Quantized], Tensor] = Quantized.decode


TORCH_KERNELS = Fp8Kernels()


class TorchFp8:
    """The backend `torch`: unfused torch operators."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return _unsupported_reason(context)

    def build(self, context: OpContext) -> Fp8Kernels:
        return replace(TORCH_KERNELS, capability=context.device.capability)


class TritonFp8:
    """The backend `triton`: casts, and GEMMs of weights' gradients, in Triton; other GEMMs are torch's."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        if context.device.is_cpu:
            return "needs a GPU"
        return _unsupported_reason(context) or compiled.compile_unsupported_reason(context.device)

    def build(self, context: OpContext) -> Fp8Kernels:
        from megascale.ops import cast_transpose, decode_blocks, scaled_wgrad

        return Fp8Kernels(
            cast_transpose.amax, cast_transpose.cast, scaled_wgrad=scaled_wgrad.scaled_wgrad, strided=True,
            capability=context.device.capability, decode=decode_blocks.decode,
        )  # fmt: skip


def _unsupported_reason(context: OpContext) -> str | None:
    """Say why torch's FP8 GEMMs cannot run on this GPU; None if they can."""
    if context.recipe is None or context.device.is_cpu:
        return None
    capability = context.device.capability
    if capability < (8, 9):
        return "FP8 GEMMs need a GPU of compute capability 8.9 or more"
    spec: QuantizerSpec = RECIPES[context.recipe].facts["input"]
    if spec.scale in ("e8m0", "nvfp4"):  # without tensor cores for them, operands are decoded
        missing = capability[0] == 10 and not hasattr(F, "scaled_mm")
        return "GEMMs with scales of a byte need torch.nn.functional.scaled_mm, of a later torch" if missing else None
    if spec.block.k is not None:
        cuda = Version(torch.version.cuda or "0")
        if capability[0] != 9 or cuda < Version("12.9") or Version(torch.__version__) < Version("2.9"):
            return "FP8 GEMMs with block scales need a GPU of compute capability 9, CUDA 12.9 and torch 2.9"
    return None
