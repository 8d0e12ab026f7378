"""Ranges of samples that a run leaves out: `data.skip_samples`, sorted ranges [start, stop) of the order of samples."""

from __future__ import annotations

from collections.abc import Sequence

Ranges = Sequence[Sequence[int]]


def order_index(position: int, skipped: Ranges) -> int:
    """The place in the order of samples of the sample at `position` among those that are not left out."""
    for start, stop in skipped:
        if position < start:
            break
        position += stop - start
    return position


def read_before(position: int, skipped: Ranges) -> int:
    """The end of the order of samples that is behind a run which has read `position` samples."""
    return order_index(position - 1, skipped) + 1 if position else 0


def below(end: int, skipped: Ranges) -> list[tuple[int, int]]:
    """The parts of ranges below `end`."""
    return [(start, min(stop, end)) for start, stop in skipped if start < end]
