"""Doubles of torch's operators for CPUs: they refuse what the operators refuse, and compute in fp64 from codes and
scales by their definitions.

`scaled_mm`: `torch.nn.functional.scaled_mm` of matrices with scales of 1 x 32 (MXFP8) and 1 x 16 (NVFP4) elements.
torch's own checks of shapes, strides, counts of scales and their order run first, on meta tensors. The rest follows
`_scaled_mm_cuda_v2_out` (aten/src/ATen/native/cuda/ScaledBlas.cpp, ScaledBlasUtils.cpp) and cuBLAS's manual.

`scaled_grouped_mm`: `torch._scaled_grouped_mm` of rows in groups, with scales of rows, as
`_scaled_grouped_mm_cuda` (aten/src/ATen/native/cuda/GroupedBlas.cpp) checks them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

real = F.scaled_mm  # before a test replaces it

E4M3, E2M1, E8M0 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
BYTES = 16  # alignment of addresses

HALVES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def scaled_mm(
    mat_a: Tensor, mat_b: Tensor, scale_a: Any, scale_recipe_a: Any, scale_b: Any, scale_recipe_b: Any,
    swizzle_a: Any = None, swizzle_b: Any = None, bias: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16, contraction_dim: Any = (), use_fast_accum: bool = False, *,
    capability: tuple[int, int] = (10, 0),
) -> Tensor:  # fmt: skip
    """Multiply mat_a [m, k] and mat_b [k, n] as the operator does on a GPU of a compute capability."""
    scales_a, scales_b, kinds_a, kinds_b, orders_a, orders_b = map(
        listed, (scale_a, scale_b, scale_recipe_a, scale_recipe_b, swizzle_a, swizzle_b)
    )
    lengths = {len(kinds_a), len(kinds_b), len(scales_a), len(scales_b), len(orders_a), len(orders_b)}
    refuse(len(lengths) > 1, ValueError, "each scale of each operand needs a kind and an order")
    on_meta = [[scale.to("meta") for scale in scales] for scales in (scales_a, scales_b)]
    real(
        mat_a.to("meta"), mat_b.to("meta"), on_meta[0], kinds_a, on_meta[1], kinds_b, orders_a, orders_b, bias,
        output_dtype, contraction_dim, use_fast_accum,
    )  # fmt: skip
    assert bias is None and not contraction_dim, "not of this double"
    dtypes = [E4M3, E4M3, E8M0, E8M0]
    if (kinds := {tuple(kinds_a), tuple(kinds_b)}) == {(ScalingType.BlockWise1x32,)}:
        decode, side, needs = of_bytes, 32, capability[0] == 10
    else:
        two = (ScalingType.BlockWise1x16, ScalingType.TensorWise)
        assert len(kinds) == 1 and kinds <= {two, two[:1]}, f"scales of {kinds} are not of this double"
        decode, side, needs, dtypes = of_halves, 16, capability[0] >= 10, [E2M1, E2M1, E4M3, E4M3]
    refuse(not needs, NotImplementedError, f"scales of 1 x {side} do not run on compute capability {capability}")
    found = [x.dtype for x in (mat_a, mat_b, scales_a[0], scales_b[0])]
    refuse(found != dtypes, ValueError, f"the operator has no {found}")
    refuse(not all(s.is_contiguous() for s in (*scales_a, *scales_b)), ValueError, "scales must be contiguous")
    refuse(use_fast_accum and mat_a.dtype == E2M1, ValueError, "FP4 has no fast accumulation")
    refuse(output_dtype not in (torch.bfloat16, torch.float16, torch.float32), ValueError, f"no {output_dtype}")
    addresses = [x.data_ptr() % BYTES for x in (mat_a, mat_b, *scales_a[:1], *scales_b[:1])]
    refuse(any(addresses), ValueError, f"addresses must be multiples of {BYTES}")
    a, b = numbers(mat_a, scales_a, decode, side), numbers(mat_b.t(), scales_b, decode, side)
    return (a @ b.t()).to(output_dtype)


def scaled_grouped_mm(
    mat_a: Tensor, mat_b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None = None,
    bias: Tensor | None = None, scale_result: Tensor | None = None, out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False, *, capability: tuple[int, int] = (10, 0),
) -> Tensor:  # fmt: skip
    """Multiply the rows of mat_a [r, k], in groups that end at `offs` [g], by the matrix of their group, of mat_b
    [g, k, n]: a row of mat_a, and a column of a matrix, has a scale.
    """
    refuse(capability not in ((9, 0), (10, 0)), NotImplementedError, f"no kernel for compute capability {capability}")
    assert mat_a.dim() == 2 and mat_b.dim() == 3 and offs is not None, "not of this double"
    refuse([mat_a.dtype, mat_b.dtype] != [E4M3, E4M3], ValueError, "both operands are e4m3")
    (rows, k), (groups, inner, n) = mat_a.shape, mat_b.shape
    refuse(k != inner, ValueError, "inner sizes differ")
    refuse(mat_a.stride() != (k, 1), ValueError, "the first operand is row-major")
    refuse(mat_b.stride() != (n * k, 1, k), ValueError, "matrices of the second operand are column-major")
    refuse(bool(k % BYTES or n % BYTES), ValueError, f"sizes must be multiples of {BYTES}")
    refuse(offs.dtype != torch.int32 or offs.shape != (groups,), ValueError, "a group has an end, i32")
    refuse(bool((offs.diff(prepend=offs.new_zeros(1)) < 0).any()) or int(offs[-1]) != rows, ValueError, "ends ascend")
    for scale, shape in ((scale_a, (rows,)), (scale_b, (groups, n))):
        fits = scale.shape == shape and scale.dtype == torch.float32 and scale.is_contiguous()
        refuse(not fits, ValueError, f"scales are contiguous fp32 {shape}")
    refuse(bias is not None or scale_result is not None, ValueError, "no bias, and no scale of the result")
    refuse(out_dtype != torch.bfloat16, ValueError, "the result is bf16")
    refuse(any(x.data_ptr() % BYTES for x in (mat_a, mat_b)), ValueError, f"addresses must be multiples of {BYTES}")
    group = torch.searchsorted(offs, torch.arange(rows), right=True)
    matrices = mat_b.double() * scale_b.double()[:, None, :]
    return torch.einsum("rk,rkn->rn", mat_a.double() * scale_a.double()[:, None], matrices[group]).to(out_dtype)


def refuse(mistake: bool, error: type[Exception], message: str) -> None:
    if mistake:
        raise error(message)


def numbers(data: Tensor, scales: list[Tensor], decode: Callable[[Tensor], Tensor], side: int) -> Tensor:
    """Decode a matrix whose first scales are in the order of tensor cores, in fp64."""
    values = decode(data)
    rows, columns = values.shape[0], -(-values.shape[1] // side)
    wide = -(-columns // 4) * 4
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    places = ((r // 128) * (wide // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    found = scales[0].view(torch.uint8).flatten()[places].view(scales[0].dtype).double()
    for scale in scales[1:]:
        found = found * scale.double()
    return values * found.repeat_interleave(side, 1)[:, : values.shape[1]]


def of_bytes(data: Tensor) -> Tensor:
    return data.double()


def of_halves(data: Tensor) -> Tensor:
    pairs = data.contiguous().view(torch.uint8).long()
    return HALVES[torch.stack([pairs % 16, pairs // 16], -1).flatten(-2)]
