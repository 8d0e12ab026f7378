"""Weight initialization by global name: every layout starts from the same model.

A tensor is drawn in blocks of rows, from a generator seeded by (seed, name, block). A rank draws the blocks that
intersect its shard and discards the rest; no rank holds a full matrix of a large model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from megascale.core.seeds import seed_of
from megascale.layout.tensors import ParamSpec, TensorSpec
from megascale.layout.topology import Coord, Topology

BLOCK = 1 << 20  # elements of a block, rounded down to whole rows, at least one row


def init_parameters(
    parameters: Iterable[tuple[torch.Tensor, ParamSpec]], topology: Topology, coord: Coord, seed: int, threads: int = 1
) -> None:
    """Initialize shards, each [local shape] of its parameter on the rank at `coord`; padding is zero. Blocks are drawn
    by `threads` at a time, as torch draws without Python's lock; their number changes no weight.
    """
    draws = (draw for target, parameter in parameters for draw in _draws(target, parameter, topology, coord, seed))
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda draw: draw(), draws):  # raises what a thread raised
            pass


@torch.no_grad()
def _draws(
    target: torch.Tensor, parameter: ParamSpec, topology: Topology, coord: Coord, seed: int
) -> Iterator[Callable[[], None]]:
    """Fill a shard with constants, and yield what draws its blocks."""
    target.zero_()
    row = 0
    for tensor in parameter.parts:
        offset, size = tensor.local_box(topology, coord)
        box = target[row : row + size[0]]
        if not isinstance(tensor.init, str):
            box.fill_(tensor.init)
        elif all(size):
            yield from _blocks(*_as_matrix(box, tensor, offset, size), seed)
        row += tensor.local_shape(topology)[0]


def _as_matrix(
    box: torch.Tensor, tensor: TensorSpec, offset: tuple[int, ...], size: tuple[int, ...]
) -> tuple[torch.Tensor, TensorSpec, tuple[int, ...], tuple[int, ...]]:
    """Return a stack of matrices, of which a rank has whole ones, as a matrix of all their rows: with its box."""
    if len(tensor.shape) < 3:
        return box, tensor, offset, size
    *inner, columns = tensor.shape[1:]
    rows = math.prod(inner)
    matrix = replace(tensor, shape=(tensor.shape[0] * rows, columns))
    return box.view(-1, columns), matrix, (offset[0] * rows, 0), (size[0] * rows, columns)


def _blocks(
    target: torch.Tensor, tensor: TensorSpec, offset: tuple[int, ...], size: tuple[int, ...], seed: int
) -> Iterator[Callable[[], None]]:
    columns = tensor.shape[1:]
    local_columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], size[1:], strict=True))
    rows = max(1, BLOCK // math.prod(columns))

    @torch.no_grad()
    def draw(block: int) -> None:
        first = block * rows
        count = min(rows, tensor.shape[0] - first)
        generator = torch.Generator().manual_seed(seed_of(seed, "weight", tensor.name, block))
        values = torch.empty(count, *columns, dtype=torch.float32).normal_(0.0, tensor.std, generator=generator)
        low, high = max(first, offset[0]), min(first + count, offset[0] + size[0])
        local_values = values[(slice(low - first, high - first), *local_columns)]
        target[low - offset[0] : high - offset[0]] = local_values.to(target.device)

    for block in range(offset[0] // rows, (offset[0] + size[0] - 1) // rows + 1):
        yield partial(draw, block)
