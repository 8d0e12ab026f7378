"""The state of a run as named global tensors, and the shards of them that this rank holds.

Saved are the master weights (`weights.NAME`), the optimizer state (`STATE.NAME`, such as `exp_avg.NAME`) and the amax
history of FP8 scaling (`fp8_history.OPERAND`). Learning rate, dropout and sample order are functions of `Progress`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megascale.comm.mesh import Mesh
from megascale.layout.boxes import boxes
from megascale.parallel.fp8_linear import Fp8State
from megascale.parallel.optimizer_shard import OptimizerShard

WEIGHTS = "weights."
"""Prefix of the names of weights."""

SAFETENSORS_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of dtypes in safetensors."""

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size of a part of a tensor."""


def slices(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a region in its tensor."""
    return tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))


@dataclass
class Progress:
    """Finished steps of a run, and the samples and tokens trained on."""

    step: int = 0
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class TensorShard:
    """A rectangular shard of a global tensor (a chunk in torch.distributed.checkpoint): `data` [size] at `offset`.

    `data` is a view of this rank's memory.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    data: torch.Tensor


@dataclass
class GlobalTensor:
    """Global shape and dtype of a named tensor, and the shards of the tensor on this rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: list[TensorShard]


def global_tensors(optimizer_shards: Sequence[OptimizerShard], mesh: Mesh) -> dict[str, GlobalTensor]:
    """Return views of the tensors that this rank saves and loads, by global name.

    Where a bucket is replicated over data parallelism, every replica has a share of the bucket.
    """
    tensors: dict[str, GlobalTensor] = {}
    for optimizer_shard in optimizer_shards:
        state = {f"{name}.": flat for name, flat in optimizer_shard.state.items()}
        for kind, flat in ({WEIGHTS: optimizer_shard.master} | state).items():
            for name, shape, shard in _tensor_shards(optimizer_shard, flat, mesh):
                tensor = tensors.setdefault(kind + name, GlobalTensor(shape, flat.dtype, []))
                tensor.shards.append(shard)
    return tensors


def fp8_history_tensors(fp8_state: Fp8State) -> dict[str, GlobalTensor]:
    """Return the amax history [steps] of every FP8 operand; all ranks hold all of the history."""
    tensors: dict[str, GlobalTensor] = {}
    for name, row in zip(fp8_state.names, fp8_state.history, strict=True):
        if row.numel():
            shape = tuple(row.shape)
            tensors[f"fp8_history.{name}"] = GlobalTensor(shape, row.dtype, [TensorShard((0,), shape, row)])
    return tensors


def split_shards(state: Mapping[str, GlobalTensor], max_bytes: int) -> dict[str, GlobalTensor]:
    """Split shards along dimension 0 into at most `max_bytes` each; a larger row stays in one shard."""
    split = {}
    for name, tensor in state.items():
        shards = [part for shard in tensor.shards for part in _split_rows(shard, max_bytes)]
        split[name] = GlobalTensor(tensor.shape, tensor.dtype, shards)
    return split


def _split_rows(shard: TensorShard, max_bytes: int) -> Iterator[TensorShard]:
    count, *rest = shard.size
    rows = max(1, max_bytes // max(1, shard.data.nbytes // count))
    for first in range(0, count, rows):
        data = shard.data[first : first + rows]
        yield TensorShard((shard.offset[0] + first, *shard.offset[1:]), (len(data), *rest), data)


def _tensor_shards(
    optimizer_shard: OptimizerShard, flat: torch.Tensor, mesh: Mesh
) -> Iterator[tuple[str, tuple[int, ...], TensorShard]]:
    """Yield name, global shape and shard of every tensor with elements in the flat memory of an optimizer shard."""
    bucket = optimizer_shard.bucket
    layout, shard_start = bucket.layout, bucket.shard[0]
    for slot, low, high in layout.param_ranges(*layout.shard_range(bucket.group.index)):
        shapes = {tensor.name: tensor.shape for tensor in slot.parameter.parts}
        for box in boxes(slot.parameter, mesh.topology, mesh.coord, low - slot.start, high - slot.start):
            start = slot.start + box.start - shard_start
            data = flat[start : start + torch.Size(box.size).numel()].view(box.size)
            yield box.name, shapes[box.name], TensorShard(box.offset, box.size, data)
