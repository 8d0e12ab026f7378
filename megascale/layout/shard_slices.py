"""Boxes: the rectangular regions of global tensors that a range of a flattened parameter stands for.

An optimizer shard is a contiguous range of a buffer, and starts and ends anywhere inside a parameter. A range of a
flattened d-dimensional box is at most 2 d - 1 boxes: in a matrix of 4 columns, elements [2, 13) are boxes of (1, 2)
at (0, 2), (2, 4) at (1, 0) and (1, 1) at (3, 0). Checkpoints store a box as a shard with its global offset: a
run of any layout can load a checkpoint of any other layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from megascale.layout.tensors import ParamSpec
from megascale.layout.topology import Coord, Topology


class ShardSlice(NamedTuple):
    """A box of tensor `name`: global offset, size, and start in the flattened local parameter."""

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int


def shard_slices(parameter: ParamSpec, topology: Topology, coord: Coord, start: int, stop: int) -> Iterator[ShardSlice]:
    """Yield the boxes of elements [start, stop) of `parameter`, flattened on the rank at `coord`.

    Padding rows belong to no tensor and to no box.
    """
    base = 0  # start of the current tensor in the flattened parameter
    for tensor in parameter.parts:
        offset, size = tensor.local_box(topology, coord)
        low, high = max(start, base), min(stop, base + math.prod(size))
        if low < high:
            for inner_offset, inner_size, at in _range_to_boxes(size, low - base, high - base):
                global_offset = tuple(o + i for o, i in zip(offset, inner_offset, strict=True))
                yield ShardSlice(tensor.name, global_offset, inner_size, base + at)
        base += math.prod(tensor.local_shape(topology))


def _range_to_boxes(
    size: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield the boxes (offset, size, flat start) of elements [start, stop) of a flattened box of `size`, in order."""
    if len(size) == 1:
        yield (start,), (stop - start,), start
        return
    inner = math.prod(size[1:])
    first, last = start // inner, (stop - 1) // inner
    row = first
    if start % inner or (first == last and stop % inner):  # a part of the first row
        end = min(stop, (first + 1) * inner)
        for offset, part, at in _range_to_boxes(size[1:], start - first * inner, end - first * inner):
            yield (first, *offset), (1, *part), first * inner + at
        row = first + 1
    rows = stop // inner - row
    if rows > 0:
        yield (row, *([0] * (len(size) - 1))), (rows, *size[1:]), row * inner
        row += rows
    if row * inner < stop and row > first:  # a part of the last row
        for offset, part, at in _range_to_boxes(size[1:], 0, stop - row * inner):
            yield (row, *offset), (1, *part), row * inner + at
