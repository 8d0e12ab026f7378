"""A Triton kernel that casts to FP8 and writes the matrix, its transpose, or both in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 128, 64  # sides of a tile: reads of 16-bit rows and writes of FP8 columns are 128 contiguous bytes

FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def cast_transpose(
    x: Tensor, factor: Tensor, fp8_max: float, dtype: torch.dtype, rowwise: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Implement `fp8.CastTranspose`."""
    (m, k), x, factor = x.shape, x.contiguous(), factor.contiguous()
    data = torch.empty(m, k, dtype=dtype, device=x.device) if rowwise else None
    transposed = torch.empty(k, m, dtype=dtype, device=x.device)
    grid = triton.cdiv(m, ROWS), triton.cdiv(k, COLUMNS)
    _cast_transpose[grid](
        x, factor, transposed if data is None else data, transposed, m, k, m // factor.shape[0], k // factor.shape[1],
        factor.shape[1], fp8_max, FORMATS[dtype], rowwise, factor.numel() == 1, ROWS, COLUMNS,
    )  # fmt: skip
    return data, transposed


# Triton evaluates annotations when it compiles, and knows none but its own
@triton.jit  # type: ignore[untyped-decorator]
def _cast_transpose(  # type: ignore[no-untyped-def] # noqa: PLR0913
    x, factor, data, transposed, m, k, high, wide, factors, fp8_max,
    fp8: tl.constexpr, rowwise: tl.constexpr, one_factor: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast a tile of x [m, k]. A factor covers `high` rows and `wide` columns; `factors`: row length of `factor`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < m) & (column < k)
    tile = tl.load(x + row * k + column, mask=inside, other=0.0).to(tl.float32)
    if one_factor:
        scaled = tile * tl.load(factor)
    else:
        index = (row // high) * factors + column // wide
        scaled = tile * tl.load(factor + index, mask=inside, other=0.0)
    cast = tl.clamp(scaled, -fp8_max, fp8_max, propagate_nan=tl.PropagateNan.ALL).to(fp8)
    if rowwise:
        tl.store(data + row * k + column, cast, mask=inside)
    tl.store(transposed + tl.trans(column) * m + tl.trans(row), tl.trans(cast), mask=tl.trans(inside))
