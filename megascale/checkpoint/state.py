"""What must survive a restart, cut into boxes of named global tensors.

Weights are saved as the optimizer holds them (`weights.NAME`), beside each of its state tensors (`STATE.NAME`), from
this rank's shards. Learning rate, dropout and the order of samples are functions of the numbers in `Progress`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megascale.comm.mesh import Mesh
from megascale.layout.shards import boxes
from megascale.parallel.eight_bit import Scaling
from megascale.parallel.shards import ShardState

WEIGHTS = "weights."
"""Begins the names of weights."""

FORMATS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""As safetensors names them."""

Part = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size of a part of a tensor."""


def slices(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    """Where a part of a tensor is in the whole."""
    return tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))


@dataclass
class Progress:
    """How far a run is: finished steps, and the samples and tokens that they trained on."""

    step: int = 0
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor; `data` [size] is a view of this rank's memory."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    data: torch.Tensor


@dataclass
class GlobalTensor:
    """The pieces of one named tensor that this rank holds, and the tensor's whole shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece]


def global_tensors(shards: Sequence[ShardState], mesh: Mesh) -> dict[str, GlobalTensor]:
    """What is this rank's to save and to load of its shards, by global name, as views: where all ranks of data
    parallelism hold all of a bucket, each has a share of it.
    """
    found: dict[str, GlobalTensor] = {}
    for shard in shards:
        state = {f"{name}.": flat for name, flat in shard.state.items()}
        for kind, flat in ({WEIGHTS: shard.master} | state).items():
            for name, shape, piece in _pieces(shard, flat, mesh):
                tensor = found.setdefault(kind + name, GlobalTensor(shape, flat.dtype, []))
                tensor.pieces.append(piece)
    return found


def history_tensors(scaling: Scaling) -> dict[str, GlobalTensor]:
    """What the 8-bit scales of later steps follow from, by operand. Every rank holds all of it."""
    found: dict[str, GlobalTensor] = {}
    for name, row in zip(scaling.names, scaling.history, strict=True):
        if row.numel():
            shape = tuple(row.shape)
            found[f"fp8_history.{name}"] = GlobalTensor(shape, row.dtype, [Piece((0,), shape, row)])
    return found


def cut(state: Mapping[str, GlobalTensor], most: int) -> dict[str, GlobalTensor]:
    """The same in pieces of at most `most` bytes, but for rows that are larger."""
    found = {}
    for name, tensor in state.items():
        pieces = [part for piece in tensor.pieces for part in _rows(piece, most)]
        found[name] = GlobalTensor(tensor.shape, tensor.dtype, pieces)
    return found


def _rows(piece: Piece, most: int) -> Iterator[Piece]:
    count, *rest = piece.size
    rows = max(1, most // max(1, piece.data.nbytes // count))
    for first in range(0, count, rows):
        data = piece.data[first : first + rows]
        yield Piece((piece.offset[0] + first, *piece.offset[1:]), (len(data), *rest), data)


def _pieces(shard: ShardState, flat: torch.Tensor, mesh: Mesh) -> Iterator[tuple[str, tuple[int, ...], Piece]]:
    layout, held = shard.bucket.layout, shard.bucket.shard[0]
    for slot, low, high in layout.parts(*layout.shard(shard.bucket.group.index)):
        shapes = {tensor.name: tensor.shape for tensor in slot.parameter.parts}
        for box in boxes(slot.parameter, mesh.topology, mesh.coord, low - slot.start, high - slot.start):
            start = slot.start + box.start - held
            count = torch.Size(box.size).numel()
            yield box.name, shapes[box.name], Piece(box.offset, box.size, flat[start : start + count].view(box.size))
