"""The state of a run as named global tensors, and the shards of them that this rank holds.

Saved are the master weights (`weights.NAME`), the optimizer state (`STATE.NAME`, such as `exp_avg.NAME`) and the amax
history of FP8 scaling (`fp8_history.OPERAND`). Learning rate, dropout and sample order are functions of `Progress`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megascale.parallel.stateful import GlobalTensor, TensorShard

SAFETENSORS_FLOATS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of the dtypes of weights in safetensors."""

SAFETENSORS_DTYPES = SAFETENSORS_FLOATS | {torch.uint8: "U8"}  # names of the dtypes of saved state
HEADER_BYTES = 4 << 10  # upper bound of the header of a file with one shard

MAX_SHARD_BYTES = 64 << 20
"""Largest stored shard, except for a larger row: the memory that a reader needs beside its state."""

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size of a part of a tensor."""


def slices(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a region in its tensor."""
    return tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))


@dataclass
class Progress:
    """Finished steps of a run, and the samples and tokens trained on, which are labels in the loss or their weights."""

    step: int = 0
    samples: int = 0
    tokens: int | float = 0  # of a saved number, pydantic keeps the type


def overlap(region: Region, box: Region) -> list[tuple[int, int]] | None:
    """Return [first, end) of what a region and a box share, in each dimension; None if they share nothing."""
    spans = [(max(low, first), min(low + n, first + count)) for low, n, first, count in zip(*region, *box, strict=True)]
    return spans if all(first < end for first, end in spans) else None


def missing_region(region: Region, boxes: Iterable[Region]) -> Region | None:
    """Return a part of a region that no box covers; None if there is none."""
    left = [region]
    for box in boxes:
        left = [part for piece in left for part in _outside(piece, box)]
    return left[0] if left else None


def _outside(region: Region, box: Region) -> Iterator[Region]:
    """Yield the parts of a region outside of a box, cut off along one dimension after another."""
    if (shared := overlap(region, box)) is None:
        yield region
        return
    offset, size = map(list, region)
    for dim, (low, high) in enumerate(shared):
        for start, stop in ((offset[dim], low), (high, offset[dim] + size[dim])):
            if start < stop:
                cut_offset, cut_size = offset.copy(), size.copy()
                cut_offset[dim], cut_size[dim] = start, stop - start
                yield tuple(cut_offset), tuple(cut_size)
        offset[dim], size[dim] = low, high - low


def shard_key(name: str, offset: Sequence[int]) -> str:
    """Return the key of a shard in its safetensors file."""
    return f"{name}@{','.join(map(str, offset))}"


def split_shards(state: Mapping[str, GlobalTensor], file_bytes: int) -> dict[str, GlobalTensor]:
    """Split shards along dimension 0, and stacks of large matrices along further ones, so that each fits a file of
    `file_bytes` and MAX_SHARD_BYTES; a larger row stays in one shard.
    """
    max_bytes = min(MAX_SHARD_BYTES, file_bytes - HEADER_BYTES)

    def split(shard: TensorShard, dim: int = 0) -> Iterator[TensorShard]:
        count = shard.size[dim]
        row_bytes = shard.data.nbytes // count
        rows = max(1, max_bytes // max(1, row_bytes))
        for first in range(0, count, rows):
            data = shard.data.narrow(dim, first, min(rows, count - first))
            offset = (*shard.offset[:dim], shard.offset[dim] + first, *shard.offset[dim + 1 :])
            part = TensorShard(offset, tuple(data.shape), data)
            yield from split(part, dim + 1) if row_bytes > max_bytes and dim + 2 < data.dim() else [part]

    return {
        name: GlobalTensor(tensor.shape, tensor.dtype, [part for shard in tensor.shards for part in split(shard)])
        for name, tensor in state.items()
    }
