"""The scores that heads see under a window or a sparse pattern, as blocks in which a band is visible (`mask_blocks`).

A window is the same for all heads, and so are the local blocks of a pattern. Of the blocks of keys before them, heads
with the same offset see the same ones: laid end to end, those keys have no mask but for the queries that are too early.
Queries between two borders, `stride` blocks apart, see equally many of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from megascale.config.sparse_pattern import Reach, SparsePattern
from megascale.layout.mask_blocks import (
    MaskBlock,
    MaskBlocks,
    band_blocks,
    documents_of,
    mask_blocks,
    merge_rectangles,
)
from megascale.layout.sequence_shard import PlacedSpan, TokenSpan


class HeadBlocks(NamedTuple):
    """The blocks of some heads. `heads`: their places in the tensor of queries; `rows`: of the micro-batch; `keys`: the
    places of the keys that the blocks count, laid end to end, None for all.
    """

    blocks: MaskBlocks
    heads: slice = slice(None)
    rows: slice = slice(None)
    keys: tuple[slice, ...] | None = None


def visible_blocks(
    queries: Sequence[TokenSpan],
    keys: Sequence[TokenSpan],
    reach: Reach | None,
    heads: range,
    starts: Sequence[Sequence[int]] | None = None,
    length: int = 0,
) -> tuple[HeadBlocks, ...]:
    """List what heads see; empty if nothing. `heads`: the numbers, over all ranks, of the heads of the queries;
    `starts`, `length`: as in `mask_blocks`.
    """
    if not isinstance(reach, SparsePattern):
        blocks = mask_blocks(queries, keys, reach, starts, length)
        return (HeadBlocks(blocks),) if blocks else ()
    assert heads, "the blocks of a pattern are those of its heads"
    near, far = list[MaskBlock](), list[HeadBlocks]()
    size, back = reach.block, (reach.local_blocks - 1) * reach.block
    for row, start, own, theirs in documents_of(queries, keys, starts, length):
        local = (
            (run.cut(at, at + size), others.cut(at - back, at + size))
            for run in own
            for at in range(run.start - (run.start - start) % size, run.stop, size)
            for others in theirs
        )
        near += band_blocks(local, None, row)
        rows = slice(None) if row is None else slice(row, row + 1)
        for place in range(min(reach.stride, len(heads))):
            seen, places = _far(reach, -heads[place] % reach.stride, start, own, theirs)
            if seen:
                far.append(HeadBlocks(seen, slice(place, len(heads), reach.stride), rows, places))
    return (HeadBlocks(MaskBlocks(near)), *far) if near else tuple(far)


def _far(
    pattern: SparsePattern, first: int, start: int, queries: Iterable[PlacedSpan], keys: Iterable[PlacedSpan]
) -> tuple[MaskBlocks, tuple[slice, ...]]:
    """Return the earlier blocks that heads see in a document that begins at `start`, number `first` and every stride-th
    after it, and the places of their keys.
    """
    size, stride = pattern.block, pattern.stride
    parts = list[tuple[int, slice]]()
    for run in sorted(keys):
        low = (run.start - start) // size
        for number in range(low + (first - low) % stride, -(-(run.stop - start) // size), stride):
            parts.append((number, run.cut(start + number * size, start + (number + 1) * size).places))
    numbers, places = [number for number, _ in parts], tuple(place for _, place in parts)
    ends = [0, *accumulate(place.stop - place.start for place in places)]
    blocks, step = list[MaskBlock](), stride * size
    border = start + (first + pattern.local_blocks) * size  # from here on queries see block `first`
    for run in queries:
        for turn in range(max(0, (run.start - border) // step), -(-(run.stop - border) // step)):
            own = run.cut(border + turn * step, border + (turn + 1) * step)
            if count := ends[bisect_right(numbers, first + turn * stride)]:
                blocks.append(MaskBlock(own.places, slice(0, count), None, None))
    return MaskBlocks(merge_rectangles(blocks)), places
