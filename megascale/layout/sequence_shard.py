"""The shard of a sequence that a context-parallel rank holds: its positions, in the order in which it holds them.

Context-parallel ranks form `keys` x `heads` groups, heads fastest. Ranks that exchange heads (`heads`) hold consecutive
pieces of a shard; ranks that exchange keys and values (`keys`) share the sequence in 2 x keys chunks, each a chunk near
the head and one near the tail, so that all of them have equal work under a causal mask. With 2 x 2 ranks:

    chunk of s / 4     0  1  2  3
    ranks 0 and 1      x        x     rank 0 holds chunk 0, rank 1 chunk 3
    ranks 2 and 3         x  x        rank 2 holds chunk 1, rank 3 chunk 2
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from megascale.config.parallel import ParallelConfig


class TokenSpan(NamedTuple):
    """The positions from `start` up to, but not with, `stop`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> TokenSpan:
        return TokenSpan(max(self.start, start), min(self.stop, stop))


class PlacedSpan(NamedTuple):
    """The positions from `start` up to `stop`, held from `place` on in a tensor."""

    start: int
    stop: int
    place: int

    def cut(self, start: int, stop: int) -> PlacedSpan:
        """Return the part of the run within these positions."""
        low = max(self.start, start)
        return PlacedSpan(low, min(self.stop, stop), self.place + low - self.start)

    @property
    def places(self) -> slice:
        return slice(self.place, self.place + self.stop - self.start)


SpanT = TypeVar("SpanT", TokenSpan, PlacedSpan)
Spans = tuple[TokenSpan, ...]


@dataclass(frozen=True)
class SequenceShard:
    """The shard of rank `index` in a sequence of `length` tokens. `parts`: the spans of every context-parallel rank. Or
    a chunk: `parts` are those of all chunks, in order. `first`: the rank of the group that has part 0.
    """

    length: int
    parts: tuple[Spans, ...]
    index: int
    first: int = 0

    @property
    def spans(self) -> Spans:
        return self.parts[self.index]

    @property
    def size(self) -> int:
        return count(self.spans)

    @property
    def is_last(self) -> bool:
        return self.index == len(self.parts) - 1

    def joined(self, first: int, ranks: int) -> Spans:
        """The positions of `ranks` ranks from `first` on, in the order of ranks."""
        return join(span for part in self.parts[first : first + ranks] for span in part)


def shard_sequence(length: int, keys: int, heads: int, index: int) -> SequenceShard:
    """Return the shard of rank `index` of keys x heads ranks, for a length that `divides_evenly`."""
    assert divides_evenly(length, keys, heads), f"{length} tokens do not divide over {keys} x {heads} ranks"
    chunk, wholes = length // (2 * keys), list[Spans]()
    for number in range(keys):
        head, tail = (TokenSpan(place * chunk, (place + 1) * chunk) for place in (number, 2 * keys - 1 - number))
        wholes.append((TokenSpan(0, length),) if keys == 1 else join((head, tail)))
    return SequenceShard(length, split_over_heads(wholes, heads), index)


def split_over_heads(wholes: Sequence[Spans], heads: int) -> tuple[Spans, ...]:
    """Split the positions of every group of ranks that exchange heads over its ranks, in equal consecutive pieces."""
    sizes = [count(whole) // heads for whole in wholes]
    return tuple(
        cut(whole, rank * size, (rank + 1) * size)
        for whole, size in zip(wholes, sizes, strict=True)
        for rank in range(heads)
    )


def sequence_shard(parallel: ParallelConfig, length: int, cp_rank: int) -> SequenceShard | None:
    """Return the shard of a context-parallel rank in sequences of `length` tokens; None without context parallelism,
    and where a planner says who shares which sequence.
    """
    if parallel.cp == 1 or parallel.hybrid_dp:
        return None
    return shard_sequence(length, parallel.cp_keys, parallel.cp_heads, cp_rank)


def whole_sequence(length: int) -> SequenceShard:
    """Return a sequence of `length` tokens as its only shard."""
    return SequenceShard(length, ((TokenSpan(0, length),),), 0)


def sequence_chunk(length: int, tokens: int, index: int) -> SequenceShard:
    """Return the chunk of number `index` of a sequence that is cut into chunks of `tokens`."""
    return SequenceShard(length, tuple((TokenSpan(at, at + tokens),) for at in range(0, length, tokens)), index)


def sequence_chunks(length: int, tokens: int | None) -> list[SequenceShard]:
    """List the chunks of `tokens` of sequences of `length` tokens, in order; none for whole sequences."""
    return [] if tokens is None else [sequence_chunk(length, tokens, index) for index in range(length // tokens)]


def divides_evenly(length: int, keys: int, heads: int) -> bool:
    """Return True if a sequence can be split over keys x heads ranks."""
    return length % (keys * heads) == 0 and (keys == 1 or length % (2 * keys) == 0)


def count(spans: Sequence[TokenSpan]) -> int:
    """Count the positions of spans."""
    return sum(span.size for span in spans)


def join(spans: Iterator[TokenSpan] | Sequence[TokenSpan]) -> Spans:
    """Merge spans that continue the span before them."""
    joined = list[TokenSpan]()
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = TokenSpan(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)


def within_documents(spans: Iterable[SpanT], starts: Sequence[int], length: int) -> list[list[SpanT]]:
    """Cut spans of a row of `length` at the `starts` of its documents; return those of each document."""
    bounds, parts = (*starts, length), [list[SpanT]() for _ in starts]
    for span in spans:
        document = bisect_right(starts, span.start) - 1
        while document < len(parts) and bounds[document] < span.stop:
            parts[document].append(span.cut(bounds[document], bounds[document + 1]))
            document += 1
    return parts


def cut(spans: Sequence[TokenSpan], start: int, stop: int) -> Spans:
    """Return the positions of spans laid end to end from the `start`-th up to the `stop`-th."""
    pieces, before = list[TokenSpan](), 0
    for span in spans:
        low, high = max(start - before, 0), min(stop - before, span.size)
        if low < high:
            pieces.append(TokenSpan(span.start + low, span.start + high))
        before += span.size
    return tuple(pieces)
