"""Initial weights by global name, so that every layout starts from the same model.

A tensor is drawn in blocks of rows, each from a generator seeded by (seed, name, block). A rank draws the blocks that
its box touches and keeps its part, so no rank ever holds a whole matrix of a large model.
"""

from __future__ import annotations

import math

import torch

from megascale.layout.tensors import Parameter, Tensor
from megascale.layout.topology import Coord, Topology
from megascale.parallel.rng import seed_of

BLOCK = 1 << 20
"""Elements in a block, about: it has as many rows as fit."""


@torch.no_grad()
def fill(target: torch.Tensor, parameter: Parameter, topology: Topology, coord: Coord, seed: int) -> None:
    """Write the initial values of `parameter` on the rank at `coord` into `target` [local shape], padding as zero."""
    target.zero_()
    row = 0
    for tensor in parameter.parts:
        offset, size = tensor.local(topology, coord)
        if all(size):
            _fill_box(target[row : row + size[0]], tensor, offset, size, seed)
        row += tensor.local_shape(topology)[0]


def _fill_box(target: torch.Tensor, tensor: Tensor, offset: tuple[int, ...], size: tuple[int, ...], seed: int) -> None:
    if tensor.init != "normal":
        target.fill_(1.0 if tensor.init == "ones" else 0.0)
        return
    rest = tensor.shape[1:]
    inside = tuple(slice(o, o + n) for o, n in zip(offset[1:], size[1:], strict=True))
    rows = max(1, BLOCK // math.prod(rest))
    for block in range(offset[0] // rows, (offset[0] + size[0] - 1) // rows + 1):
        first = block * rows
        count = min(rows, tensor.shape[0] - first)
        generator = torch.Generator().manual_seed(seed_of(seed, "weight", tensor.name, block))
        drawn = torch.empty(count, *rest).normal_(0.0, tensor.std, generator=generator)
        low, high = max(first, offset[0]), min(first + count, offset[0] + size[0])
        own = drawn[(slice(low - first, high - first), *inside)]
        target[low - offset[0] : high - offset[0]] = own.to(target.device)
