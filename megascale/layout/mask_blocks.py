"""The scores of attention between queries and keys at known positions, as blocks in which a band is visible.

A query at position p of a document sees the keys of that document at positions j with p - window < j <= p. Queries and
keys come as spans of positions (`layout.sequence_shard`), in tensors that hold the spans end to end. Between a run of
queries and a run of keys the visible scores are a band. A `MaskBlock` has the queries that see a key and the keys that
a query sees: nothing else is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from megascale.layout.sequence_shard import PlacedSpan, TokenSpan, count, within_documents
from megascale.layout.windows import QUERY_BLOCK

T = TypeVar("T")


class MaskBlock(NamedTuple):
    """A rectangle of scores with its visible band. `queries`, `keys`: places in the two tensors. Aligned at its last
    query and its last key, query i sees the keys from `left` before its own place up to `right` after it; None: all
    keys on that side. These are flash-attn's windows. `row`: of the micro-batch; None for all of its rows.
    """

    queries: slice
    keys: slice
    left: int | None
    right: int | None
    row: int | None = None

    @property
    def offset(self) -> int:
        """The key of the first query's own place, from the first key of the block."""
        return self.keys.stop - self.keys.start - (self.queries.stop - self.queries.start)

    @property
    def rows(self) -> slice:
        return slice(None) if self.row is None else slice(self.row, self.row + 1)


class MaskBlocks(tuple[MaskBlock, ...]):
    """Blocks, with what backends compute of them, such as index tensors: once for all layers."""

    def __init__(self, blocks: Iterable[MaskBlock] = ()) -> None:
        self._derived: dict[Hashable, Any] = {}

    def derive(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return what was computed under this key, or compute it."""
        if key not in self._derived:
            self._derived[key] = compute()
        found: T = self._derived[key]
        return found


class Tile(NamedTuple):
    """Scores that a kernel computes at once, which knows two masks: the `diagonal` of a square, where query i sees the
    keys up to the i-th, and a tensor. `band`: with a tensor, the lowest and the highest visible key - query, as places
    in the tensors of queries and keys.
    """

    queries: slice
    keys: slice
    diagonal: bool = False
    band: tuple[int, int] | None = None


def tiles(block: MaskBlock) -> Iterator[Tile]:
    """Cut a block to tiles. Without a window: a square on the diagonal, and what lies beside it, which is visible; with
    a window: blocks of queries.
    """
    queries, keys = block.queries, block.keys
    if block.left is None and block.right is None:
        yield Tile(queries, keys)
    elif block.left is None:
        assert block.right is not None
        right = keys.start + block.offset + block.right  # of the keys that every query sees: there the square begins
        side = min(queries.stop - queries.start, keys.stop - right)
        below = queries.start + side
        if right > keys.start:
            yield Tile(queries, slice(keys.start, right))
        yield Tile(slice(queries.start, below), slice(right, right + side), diagonal=True)
        if below < queries.stop:
            yield Tile(slice(below, queries.stop), slice(right, keys.stop))
    else:
        own = keys.stop - queries.stop  # key - query of a query's own place
        low, high = own - block.left, keys.stop - queries.start if block.right is None else own + block.right
        for start in range(queries.start, queries.stop, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, queries.stop)
            seen = slice(max(keys.start, start + low), min(keys.stop, stop + high))
            yield Tile(slice(start, stop), seen, band=(low, high))


def mask_blocks(
    queries: Sequence[TokenSpan],
    keys: Sequence[TokenSpan],
    window: int | None,
    starts: Sequence[Sequence[int]] | None = None,
    length: int = 0,
) -> MaskBlocks:
    """List the blocks of visible scores. `starts`: for each row of a micro-batch of rows of `length`, the positions at
    which its documents begin; None: every row is a single document.
    """
    if starts is None and window is None and tuple(queries) == tuple(keys):
        size = count(queries)  # spans ascend: a triangle also where they are held
        return MaskBlocks([MaskBlock(slice(0, size), slice(0, size), None, 0)])
    pairs = (
        (row, itertools.product(own, theirs)) for row, _, own, theirs in documents_of(queries, keys, starts, length)
    )
    blocks = (block for row, runs in pairs for block in band_blocks(runs, window, row))
    return MaskBlocks(merge_rectangles(blocks) if starts is None else blocks)


def documents_of(
    queries: Sequence[TokenSpan], keys: Sequence[TokenSpan], starts: Sequence[Sequence[int]] | None, length: int
) -> Iterator[tuple[int | None, int, list[PlacedSpan], list[PlacedSpan]]]:
    """Yield of every document its row, the position where it begins, and the runs of queries and of keys in it.
    `starts`, `length`: as in `mask_blocks`.
    """
    sides = _runs(queries), _runs(keys)
    if starts is None:
        yield None, 0, *sides
    for row, begins in enumerate(starts or ()):
        in_queries, in_keys = (within_documents(side, begins, length) for side in sides)
        yield from zip(itertools.repeat(row), begins, in_queries, in_keys)


def merge_rectangles(blocks: Iterable[MaskBlock]) -> list[MaskBlock]:
    """Merge each block with the one before it, where both are visible as a whole and make a rectangle."""
    merged = list[MaskBlock]()
    for block in blocks:
        before = merged[-1] if merged else block
        whole = (before.left, before.right, block.left, block.right) == (None, None, None, None)
        if whole and before.queries == block.queries and before.keys.stop == block.keys.start:
            merged[-1] = block._replace(keys=slice(before.keys.start, block.keys.stop))
        elif whole and before.keys == block.keys and before.queries.stop == block.queries.start:
            merged[-1] = block._replace(queries=slice(before.queries.start, block.queries.stop))
        else:
            merged.append(block)
    return merged


def _runs(spans: Sequence[TokenSpan]) -> list[PlacedSpan]:
    ends = itertools.accumulate(span.size for span in spans)
    return [PlacedSpan(*span, end - span.size) for span, end in zip(spans, ends, strict=True)]


def band_blocks(
    pairs: Iterable[tuple[PlacedSpan, PlacedSpan]], window: int | None, row: int | None
) -> Iterator[MaskBlock]:
    """Yield the blocks of pairs of a run of queries and a run of keys."""
    for queries, keys in pairs:
        q = queries.cut(keys.start, queries.stop if window is None else keys.stop - 1 + window)  # that see a key
        k = keys.cut(keys.start if window is None else q.start - window + 1, q.stop)  # that a query sees
        if q.start >= q.stop or k.start >= k.stop:
            continue
        right: int | None = q.stop - k.stop
        left = None if window is None or q.stop - 1 - k.start < window else window - 1 - (q.stop - k.stop)
        yield MaskBlock(q.places, k.places, left, None if k.stop - 1 <= q.start else right, row)
