"""Packs of sequences that share a micro-batch, best-fit decreasing, and rows of equal documents."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def pack_sequences(sequences: Sequence[tuple[int, int]], capacity: int) -> list[tuple[int, ...]]:
    """Pack sequences, as (number, length), each into the fullest pack with room. From the longest to the shortest there
    are fewest packs. A sequence longer than `capacity` has a pack of its own. Packs are in the order of their first.
    """
    packs, rooms = list[list[int]](), list[tuple[int, int]]()  # rooms: (room, pack), ascending
    for number, length in sequences:
        place = bisect_left(rooms, (length, -1))
        if place == len(rooms):
            packs.append([number])
            room, pack = capacity - length, len(packs) - 1
        else:
            room, pack = rooms.pop(place)
            packs[pack].append(number)
            room -= length
        if room > 0:
            insort(rooms, (room, pack))
    return [tuple(pack) for pack in packs]


def deal(timed: Iterable[tuple[float, T]], ready: Sequence[float]) -> tuple[list[list[T]], list[float]]:
    """Deal items of some seconds, in order, each to the group that is ready first. `ready`: seconds at which each group
    is at first. Returns the items of the groups, and when each ends.
    """
    held, heap = [list[T]() for _ in ready], [(start, group) for group, start in enumerate(ready)]
    heapq.heapify(heap)
    for seconds, item in timed:
        start, group = heap[0]
        held[group].append(item)
        heapq.heapreplace(heap, (start + seconds, group))
    return held, [end for end, _ in sorted(heap, key=lambda end: end[1])]


def equal_documents(s: int, length: int | None) -> list[int]:
    """The lengths of documents that fill a row of s tokens: `length` each, but for the last; None: a single one."""
    length = min(length or s, s)
    return [length] * (s // length) + ([s % length] if s % length else [])
