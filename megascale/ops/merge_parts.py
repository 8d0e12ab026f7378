"""A Triton kernel that adds a part of attention to the sum of the parts before it (`ops.partial_attention`), in one
pass: it reads and writes the sum once, wherever the queries of the part are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

QUERIES = 32  # of a program


def merge_part(
    total: tuple[Tensor, Tensor], rows: Tensor | slice, places: Tensor | slice, out: Tensor, lse: Tensor
) -> None:
    """Implement `flash_partial.Merge`."""
    (sums, sums_lse), out, lse = total, out.contiguous(), lse.contiguous()
    m, heads, d = out.shape
    indices, run = (rows, places), (0, 0, 1)
    if isinstance(rows, slice) and isinstance(places, slice):
        indices, run = (sums_lse, sums_lse), (rows.start, places.start, places.stop - places.start)  # no index is read
    _merge_part[triton.cdiv(m, QUERIES), heads](
        sums, sums_lse, out, lse, *indices, m, heads, d, *run, *sums.stride()[:3], *sums_lse.stride(),
        isinstance(rows, Tensor), QUERIES, triton.next_power_of_2(d),
    )  # fmt: skip


# Triton evaluates annotations when it compiles, and knows none but its own
@triton.jit(do_not_specialize=["m", "first_row", "first_place", "run"])  # type: ignore[untyped-decorator]
def _merge_part(  # type: ignore[no-untyped-def] # noqa: PLR0913
    sums, sums_lse, out, lse, rows, places, m, heads, d, first_row, first_place, run, row_stride, head_stride,
    place_stride, lse_row_stride, lse_head_stride, lse_place_stride,
    gathers: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add the queries of a program, of one head. Without `gathers` they are runs of `run` places in rows that follow
    each other.
    """
    query, head = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES), tl.program_id(1).to(tl.int64)
    there = query < m
    if gathers:
        row, place = tl.load(rows + query, mask=there, other=0), tl.load(places + query, mask=there, other=0)
    else:
        row, place = (first_row + query // run).to(tl.int64), (first_place + query % run).to(tl.int64)
    at = sums_lse + row * lse_row_stride + head * lse_head_stride + place * lse_place_stride
    before, part = tl.load(at, mask=there, other=0.0), tl.load(lse + head * m + query, mask=there, other=0.0)
    high = tl.maximum(before, part)
    after = high + tl.log(tl.exp(before - high) + tl.exp(part - high))
    tl.store(at, after, mask=there)
    column = tl.arange(0, WIDTH)[None, :]
    inside = there[:, None] & (column < d)
    tile = sums + (row * row_stride + head * head_stride + place * place_stride)[:, None] + column
    added = tl.load(out + ((query * heads + head) * d)[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    kept = tl.load(tile, mask=inside, other=0.0) * tl.exp(before - after)[:, None]
    tl.store(tile, kept + added * tl.exp(part - after)[:, None], mask=inside)
