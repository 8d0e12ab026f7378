"""The scores that heads see under a window or a sparse pattern, as blocks in which a band is visible (`mask_blocks`).

A window is the same for all heads, and so are the local blocks of a pattern. Of the blocks of keys before them, heads
with the same offset see the same ones: each as a whole, for the queries that come late enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megascale.config.sparse_pattern import Reach, SparsePattern
from megascale.layout.mask_blocks import MaskBlock, MaskBlocks, band_blocks, documents_of, mask_blocks
from megascale.layout.sequence_shard import PlacedSpan, TokenSpan


class HeadBlocks(NamedTuple):
    """The blocks of some heads. `heads`: their places in the tensor of queries."""

    blocks: MaskBlocks
    heads: slice = slice(None)


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
    size, stride, local = reach.block, reach.stride, reach.local_blocks
    near, far = list[MaskBlock](), [list[MaskBlock]() for _ in range(stride)]
    for row, start, own, theirs in documents_of(queries, keys, starts, length):
        for number, part in _blocks(own, start, size):
            pairs = ((part, run.cut(start + (number - local + 1) * size, part.stop)) for run in theirs)
            near += band_blocks(pairs, None, row)
        for number, part in _blocks(theirs, start, size):
            pairs = ((run.cut(start + (number + local) * size, run.stop), part) for run in own)
            far[-number % stride] += band_blocks(pairs, None, row)
    groups = [(near, slice(None))]
    groups += [(blocks, slice((head - heads.start) % stride, len(heads), stride)) for head, blocks in enumerate(far)]
    return tuple(HeadBlocks(MaskBlocks(blocks), of) for blocks, of in groups if blocks and heads[of])


def _blocks(runs: Iterable[PlacedSpan], start: int, size: int) -> Iterator[tuple[int, PlacedSpan]]:
    """Yield the parts of runs in the blocks of a document that begins at `start`, each with its block's number."""
    for run in runs:
        for number in range((run.start - start) // size, -(-(run.stop - start) // size)):
            yield number, run.cut(start + number * size, start + (number + 1) * size)
