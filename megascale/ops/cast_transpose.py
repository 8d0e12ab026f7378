"""A cast to 8 bits that writes a matrix, its transpose, or both in one pass over its numbers: a Triton kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 128, 64
"""Of a tile: what is read, in 16 bits, and written, transposed in 8, are 128 bytes in a row."""

FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def cast_transpose(
    x: Tensor, factor: Tensor, largest: float, dtype: torch.dtype, rows: bool = True
) -> tuple[Tensor | None, Tensor]:
    """See `fp8.CastTranspose`."""
    (m, k), x, factor = x.shape, x.contiguous(), factor.contiguous()
    data = torch.empty(m, k, dtype=dtype, device=x.device) if rows else None
    across = torch.empty(k, m, dtype=dtype, device=x.device)
    grid = triton.cdiv(m, ROWS), triton.cdiv(k, COLUMNS)
    _cast_transpose[grid](
        x, factor, across if data is None else data, across, m, k, m // factor.shape[0], k // factor.shape[1],
        factor.shape[1], largest, FORMATS[dtype], rows, factor.numel() == 1, ROWS, COLUMNS,
    )  # fmt: skip
    return data, across


@triton.jit  # type: ignore[untyped-decorator]
def _cast_transpose(  # noqa: PLR0913
    x: Any, factor: Any, data: Any, across: Any, m: Any, k: Any, high: Any, wide: Any, factors: Any, largest: Any,
    number: tl.constexpr, along: tl.constexpr, one: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of x [m, k]. `high`, `wide`: rows and columns that share a factor; `factors` of them stand in a line."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < m) & (column < k)
    wide_numbers = tl.load(x + row * k + column, mask=inside, other=0.0).to(tl.float32)
    if one:
        scaled = wide_numbers * tl.load(factor)
    else:
        place = (row // high) * factors + column // wide
        scaled = wide_numbers * tl.load(factor + place, mask=inside, other=0.0)
    cast = tl.clamp(scaled, -largest, largest, propagate_nan=tl.PropagateNan.ALL).to(number)
    if along:
        tl.store(data + row * k + column, cast, mask=inside)
    tl.store(across + tl.trans(column) * m + tl.trans(row), tl.trans(cast), mask=tl.trans(inside))
