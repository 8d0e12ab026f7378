"""A range of a flattened parameter as boxes of the tensors that it is made of.

An optimizer shard is a contiguous range of a buffer, so it starts and ends anywhere inside a parameter. A range of a
flattened d-dimensional box is at most 2 d - 1 boxes; checkpoints store these by global offset, so any layout can read
what any other wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from megascale.layout.tensors import Parameter
from megascale.layout.topology import Coord, Topology


class Box(NamedTuple):
    """A box of tensor `name`: global offset and size, and where it starts in the flattened local parameter."""

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int


def boxes(parameter: Parameter, topology: Topology, coord: Coord, start: int, stop: int) -> Iterator[Box]:
    """The boxes that elements [start, stop) of `parameter`, flattened on the rank at `coord`, stand for.

    Padding rows belong to no tensor and to no box.
    """
    base = 0  # where the current tensor starts in the flattened parameter
    for tensor in parameter.parts:
        offset, size = tensor.local(topology, coord)
        low, high = max(start, base), min(stop, base + math.prod(size))
        if low < high:
            for inner_offset, inner_size, at in _cut(size, low - base, high - base):
                place = tuple(o + i for o, i in zip(offset, inner_offset, strict=True))
                yield Box(tensor.name, place, inner_size, base + at)
        base += math.prod(tensor.local_shape(topology))


def _cut(size: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Boxes (offset, size, flat start) that elements [start, stop) of a flattened box of `size` fill, in order."""
    if len(size) == 1:
        yield (start,), (stop - start,), start
        return
    inner = math.prod(size[1:])
    first, last = start // inner, (stop - 1) // inner
    row = first
    if start % inner or (first == last and stop % inner):  # a part of the first row
        end = min(stop, (first + 1) * inner)
        for offset, part, at in _cut(size[1:], start - first * inner, end - first * inner):
            yield (first, *offset), (1, *part), first * inner + at
        row = first + 1
    rows = stop // inner - row
    if rows > 0:
        yield (row, *([0] * (len(size) - 1))), (rows, *size[1:]), row * inner
        row += rows
    if row * inner < stop and row > first:  # a part of the last row
        for offset, part, at in _cut(size[1:], 0, stop - row * inner):
            yield (row, *offset), (1, *part), row * inner + at
