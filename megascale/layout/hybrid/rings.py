"""Rings for sequences that exceed a rank: rows of rings over the pool, each ring on consecutive ranks (`place_rings`).

Sequences go into rows by first-fit decreasing of their numbers of ranks (Johnson 1973). A row is the micro-batch of one
index. Rows with more ranks in rings come first, and rings begin at rank 0, so that a rank's rings are its first
micro-batches without a gap. Ranks left over in a row lengthen the rings with most work per rank.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megascale.layout.hybrid.sequence_work import SequenceWork


class ContextRing(NamedTuple):
    """A sequence on `ranks` consecutive ranks. `seconds`: of each of them."""

    sequence: int
    ranks: int
    seconds: float


@dataclass(frozen=True)
class Rings:
    """Rows of rings over the pool. By rank: `ready`, the seconds after which its rings are done, and `longest`, the
    seconds of its longest micro-batch.
    """

    rows: tuple[tuple[ContextRing, ...], ...]
    ready: tuple[float, ...]
    longest: tuple[float, ...]


def place_rings(
    long: Sequence[tuple[int, int]], pool: int, max_tokens: int, work: SequenceWork, most_s: float, target: float
) -> Rings:
    """Place sequences, as (number, length) from the longest to the shortest, on the ranks of a pool.

    A ring has as many ranks as it needs for `max_tokens` on each, and for `most_s` seconds; more if its row has ranks
    left and the row takes more than its share of `target` seconds; at most one a token.
    """
    sized = []
    for number, length in long:
        least, wanted = math.ceil(length / max_tokens), min(pool, length, math.ceil(work.whole(length) / most_s))
        faster = wanted > least and work.shared([length], wanted) < work.shared([length], least)
        sized.append((wanted if faster else least, number, length))
    sized.sort(key=lambda ring: -ring[0])
    rows, rooms = list[list[tuple[int, int, int]]](), list[int]()
    for ring in sized:
        place = next((at for at, room in enumerate(rooms) if room >= ring[0]), len(rows))
        if place == len(rows):
            rows.append([])
            rooms.append(pool)
        rows[place].append(ring)
        rooms[place] -= ring[0]
    share = target / max(1, len(rows))
    stretched = [_stretch(row, room, work, share) for row, room in zip(rows, rooms, strict=True)]
    stretched.sort(key=lambda row: -sum(ring.ranks for ring in row))
    return _deal(stretched, pool)


def _stretch(row: list[tuple[int, int, int]], room: int, work: SequenceWork, share: float) -> list[ContextRing]:
    """Give the ranks left over in a row to the rings that take longest, down to `share` seconds."""
    heap = [(-work.shared([length], ranks), number, length, ranks) for ranks, number, length in row]
    heapq.heapify(heap)
    while room and -heap[0][0] > share:
        seconds, number, length, ranks = heap[0]
        if ranks == length:
            break
        more = work.shared([length], ranks + 1)
        if more >= -seconds:  # its messages take longer than its work
            break
        heapq.heapreplace(heap, (-more, number, length, ranks + 1))
        room -= 1
    return [ContextRing(number, ranks, -seconds) for seconds, number, _, ranks in sorted(heap)]


def _deal(rows: list[list[ContextRing]], pool: int) -> Rings:
    """Order the rings of each row by time, descending or ascending, whichever ends first with the rows before."""
    ready, longest, dealt = [0.0] * pool, [0.0] * pool, list[tuple[ContextRing, ...]]()
    for row in rows:
        ends = [(_run(order, ready), order) for order in (row, row[::-1])]
        ready, order = min(ends, key=lambda end: max(end[0]))
        first = 0
        for ring in order:
            for rank in range(first, first + ring.ranks):
                longest[rank] = max(longest[rank], ring.seconds)
            first += ring.ranks
        dealt.append(tuple(order))
    return Rings(tuple(dealt), tuple(ready), tuple(longest))


def _run(row: Sequence[ContextRing], ready: list[float]) -> list[float]:
    """Return when every rank is done with a row: a ring starts when all of its ranks are ready."""
    done, first = list(ready), 0
    for ring in row:
        members = slice(first, first + ring.ranks)
        done[members] = [max(ready[members]) + ring.seconds] * ring.ranks
        first += ring.ranks
    return done
