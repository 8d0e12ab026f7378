"""A Triton GEMM of FP8 matrices that accumulates into a weight's fp32 gradient:

    total [m, n] = a b^T (+ total)        a [m, k], b [n, k], a scale per tensor, row, or 128 elements of a row

Tensor cores accumulate FP8 GEMMs in fewer bits than fp32. After every 128 elements of k their sum is added to an fp32
sum, as by cuBLAS (its split accumulator). A kernel is compiled for dtypes, kinds of scales, and whether n and k are
multiples of 16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megascale.catalog.recipes import BLOCK, BLOCK_1D, ROW, TENSOR
from megascale.ops import fp8
from megascale.ops.quantized import Quantized

SIDE = 128  # of a tile of the result
TILES_IN_GROUP = 8  # rows of tiles that run together, and share columns of b in cache
WARPS, STAGES = 8, 3  # 96 KiB of shared memory, which Ada has too


def scaled_wgrad(total: Tensor, a: Quantized, b: Quantized, add: bool) -> None:
    """Implement `fp8.ScaledWgrad`."""
    if a.block != b.block or a.block not in (TENSOR, ROW, BLOCK_1D):
        fp8.scaled_wgrad(total, a, b, add)
        return
    (m, k), n = a.shape, b.shape[0]
    left, right = a.data.contiguous(), b.data.contiguous()
    scales = [x.scale.expand(x.shape[0], 1) if x.block != BLOCK_1D else x.scale for x in (a, b)]
    strides = [stride for scale in scales for stride in scale.stride()]
    _fp8_gemm[triton.cdiv(m, SIDE) * triton.cdiv(n, SIDE),](
        left, right, *scales, total, m, n, k, *strides, add, a.block == BLOCK_1D, SIDE, BLOCK, TILES_IN_GROUP,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


# Triton evaluates annotations when it compiles, and knows none but its own
@triton.jit(do_not_specialize=["m", "row_a", "along_a", "row_b", "along_b"])  # type: ignore[untyped-decorator]
def _fp8_gemm(  # type: ignore[no-untyped-def] # noqa: PLR0913
    a, b, scale_a, scale_b, total, m, n, k, row_a, along_a, row_b, along_b, ADD: tl.constexpr, IN_BLOCKS: tl.constexpr,
    SIDE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the result. `row_a`, `along_a`: strides of a's scales from row to row, and along k."""
    high, wide = tl.cdiv(m, SIDE), tl.cdiv(n, SIDE)
    group, within = tl.program_id(0) // (GROUP * wide), tl.program_id(0) % (GROUP * wide)
    rows = min(high - group * GROUP, GROUP)
    top, left = (group * GROUP + within % rows) * SIDE, (within // rows) * SIDE
    along, i, j = tl.arange(0, BLOCK), tl.arange(0, SIDE), tl.arange(0, SIDE)
    # operands' last rows stand for those beyond; offsets within a tile have 32 bits: others take more registers
    of_a, of_b = tl.minimum(i, m - 1 - top), tl.minimum(j, n - 1 - left)
    from_a = a + top.to(tl.int64) * k + (of_a[:, None] * k + along[None, :])
    from_b = b + left.to(tl.int64) * k + (of_b[None, :] * k + along[:, None])
    scale_a, scale_b, of_a, of_b = scale_a + top * row_a, scale_b + left * row_b, of_a * row_a, of_b * row_b
    sums = tl.zeros([SIDE, SIDE], tl.float32)
    for block in range(tl.cdiv(k, BLOCK)):
        x = tl.load(from_a, mask=along[None, :] < k - block * BLOCK, other=0.0)
        y = tl.load(from_b, mask=along[:, None] < k - block * BLOCK, other=0.0)
        if IN_BLOCKS:
            of_x, of_y = tl.load(scale_a + block * along_a + of_a), tl.load(scale_b + block * along_b + of_b)
            sums += tl.dot(x, y) * (of_x[:, None] * of_y[None, :])
        else:
            sums = tl.dot(x, y, sums, max_num_imprecise_acc=BLOCK)
        from_a += BLOCK
        from_b += BLOCK
    if not IN_BLOCKS:
        sums *= tl.load(scale_a + of_a)[:, None] * tl.load(scale_b + of_b)[None, :]
    places = total + top.to(tl.int64) * n + left + (i[:, None] * n + j[None, :])
    inside = (i < m - top)[:, None] & (j < n - left)[None, :]
    if ADD:
        sums += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, sums, mask=inside)
