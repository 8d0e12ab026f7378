"""Best-fit decreasing on the counts of lengths (Ding et al. 2024, "Fewer Truncations Improve Language Modeling").

Documents are placed from the longest to the shortest, each into the fullest row with room for it, or a new one. Those
of a length go into rows with equal room together, so that the time depends on the lengths, not on the documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RowGroup:
    """`rows` rows with the same lengths in them: (length, documents of it) in descending order."""

    rows: int
    contents: tuple[tuple[int, int], ...] = ()

    def add(self, rows: int, length: int, documents: int) -> RowGroup:
        """Return `rows` of these rows with `documents` more documents of a length each."""
        return RowGroup(rows, (*self.contents, (length, documents)))


def best_fit(counts: Sequence[int], capacity: int) -> list[RowGroup]:
    """Pack counts[n] documents of n tokens, 0 < n <= capacity, into rows of `capacity` tokens."""
    groups = defaultdict[int, list[RowGroup]](list)  # by room
    rooms: list[int] = []  # ascending, those with groups
    for length in range(len(counts) - 1, 0, -1):
        left = int(counts[length])
        while left:
            room, group = _take_fullest(groups, rooms, length) or (capacity, RowGroup(left))
            each = room // length  # a row stays the fullest with room until it has no more
            full = min(group.rows, left // each)
            rest = left - full * each if full < group.rows else 0
            parts = [
                (room - each * length, group.add(full, length, each)),
                (room - rest * length, group.add(1, length, rest)) if rest else (0, RowGroup(0)),
            ]
            if room < capacity or group.contents:
                parts.append((room, RowGroup(group.rows - full - bool(rest), group.contents)))
            for remaining, part in parts:
                if part.rows:
                    _put(groups, rooms, remaining, part)
            left -= full * each + rest
    return [group for room in rooms for group in groups[room]]


def _take_fullest(groups: dict[int, list[RowGroup]], rooms: list[int], length: int) -> tuple[int, RowGroup] | None:
    """Take a group of the fullest rows with room for a length."""
    place = bisect_left(rooms, length)
    if place == len(rooms):
        return None
    room = rooms[place]
    group = groups[room].pop()
    if not groups[room]:
        del rooms[place]
    return room, group


def _put(groups: dict[int, list[RowGroup]], rooms: list[int], room: int, group: RowGroup) -> None:
    if not groups[room]:
        insort(rooms, room)
    groups[room].append(group)


def row_count(groups: Sequence[RowGroup]) -> int:
    """Count the rows."""
    return sum(group.rows for group in groups)


def lengths_of(group: RowGroup) -> Iterator[int]:
    """The lengths of the documents in a row of a group."""
    return (length for length, documents in group.contents for _ in range(documents))
