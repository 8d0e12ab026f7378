"""Planners of torch.distributed.checkpoint over `GlobalTensor`s, and the manifest of a finished plan.

torch's planners assign every replicated shard to one rank, balance the bytes, prove that the shards of a tensor fill
it without overlap, and find the stored shards that a shard to load intersects. This module describes our shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.state import slices
from megascale.core.errors import CheckpointError
from megascale.core.storage import Location
from megascale.parallel.stateful import GlobalTensor

GlobalTensors = Mapping[str, GlobalTensor]

ShardDescriptions = Sequence[Any]
"""A rank's shards as JSON: name, dtype and shape of a tensor, and offset and size of its shards."""


def describe_shards(state: GlobalTensors) -> ShardDescriptions:
    """Describe the shards on this rank."""
    return [
        (name, str(tensor.dtype).removeprefix("torch."), tensor.shape, [(p.offset, p.size) for p in tensor.shards])
        for name, tensor in state.items()
    ]


def full_save_plan(descriptions: ShardDescriptions) -> SavePlan:
    """Return the plan of a rank that writes all of its shards."""
    items = []
    for name, dtype, shape, shards in descriptions:
        properties = TensorProperties(dtype=getattr(torch, dtype))
        for offset, size in shards:
            data = TensorWriteData(_chunk(offset, size), properties, torch.Size(shape))
            items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def shard_key(name: str, offset: Sequence[int]) -> str:
    """Return the key of a shard in its safetensors file."""
    return f"{name}@{','.join(map(str, offset))}"


def total_bytes(metadata: Metadata) -> int:
    """Return the bytes of all tensors."""
    tensors = [tensor for tensor in metadata.state_dict_metadata.values() if isinstance(tensor, TensorStorageMetadata)]
    return sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors)


def build_manifest(
    facts: manifest.Facts,
    metadata: Metadata,
    locations: Mapping[str, Mapping[str, Any]],
    files: dict[str, manifest.StoredFile],
    checksum_block_bytes: int,
) -> manifest.Manifest:
    """Build the manifest; `locations` gives file, first byte and checksums of every shard by `shard_key`."""
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        shards = tuple(
            manifest.StoredShard(
                offset=tuple(shard.offsets), size=tuple(shard.sizes), **locations[shard_key(name, shard.offsets)]
            )
            for shard in tensor.chunks
        )
        tensors[name] = manifest.StoredTensor.from_torch(tensor.size, tensor.properties.dtype, shards)
    return manifest.Manifest(facts=facts, chunk=checksum_block_bytes, files=files, tensors=tensors)


def _name_and_offset(item: WriteItem) -> tuple[str, Any]:
    return item.index.fqn, item.index.offset


def _chunk(offset: Sequence[int], size: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(size))


def _data_by_offset(state: GlobalTensors) -> dict[tuple[str, torch.Size], torch.Tensor]:
    return {(name, torch.Size(p.offset)): p.data for name, tensor in state.items() for p in tensor.shards}


class SavePlanner(DefaultSavePlanner):
    """Plans the shards that this rank writes."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: GlobalTensors, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._state = state_dict
        self._data = _data_by_offset(state_dict)
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = full_save_plan(describe_shards(self._state))
        return self.plan

    def assign_writes(self, ranks: Sequence[ShardDescriptions]) -> tuple[list[list[int]], Metadata]:
        """Assign every shard to one rank: item indices in a rank's own plan, by rank; and the metadata of all."""
        local = [full_save_plan(descriptions) for descriptions in ranks]
        assigned, metadata = self.create_global_plan(local)
        indices = [{_name_and_offset(item): index for index, item in enumerate(plan.items)} for plan in local]
        writes = [
            [index_of[_name_and_offset(item)] for item in plan.items]
            for index_of, plan in zip(indices, assigned, strict=True)
        ]
        return writes, metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        offset = write_item.index.offset
        assert offset is not None, "every shard has an offset"
        return self._data[write_item.index.fqn, offset]


class LoadPlanner(DefaultLoadPlanner):
    """Plans the stored shards of the checkpoint at `path` that fill this rank's shards.

    Raises: CheckpointError for a missing tensor or another shape, DamagedError for a tensor stored in part
    """

    def __init__(self, path: Location) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._path = path

    def set_up_planner(
        self, state_dict: GlobalTensors, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._state = state_dict
        self._data = _data_by_offset(state_dict)
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "the reader gives the metadata"
        plan: list[ReadItem] = []
        for name, tensor in self._state.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(f"{self._path} has no tensor {name}", hint="it is of another model or optimizer")
            if tuple(stored.size) != tensor.shape:
                raise CheckpointError(
                    f"{self._path}: {name} has shape {list(stored.size)} there, {list(tensor.shape)} in this run",
                    hint="resume with the [model] section of the run that saved it",
                )
            items = create_read_items_for_chunk_list(
                name, stored, [_chunk(shard.offset, shard.size) for shard in tensor.shards]
            )
            numel = sum(math.prod(shard.size) for shard in tensor.shards)
            if sum(math.prod(item.lengths) for item in items) != numel:
                raise manifest.DamagedError(f"{self._path} holds only a part of {name}")
            plan += items
        return LoadPlan(plan)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        offset = read_item.dest_index.offset
        assert offset is not None, "every shard has an offset"
        return self._data[read_item.dest_index.fqn, offset][slices(read_item.dest_offsets, read_item.lengths)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        return None
