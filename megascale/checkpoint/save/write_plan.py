"""The write plan: the tensor shards and files that this rank writes in every save.

torch's planner assigns every replicated shard to one rank, balances the bytes, and proves that the shards of a tensor
fill it without overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.safetensors_file import checksum_block_bytes
from megascale.checkpoint.format.state import SAFETENSORS_DTYPES, shard_key
from megascale.checkpoint.save.snapshot import Snapshot
from megascale.comm.mesh import Mesh
from megascale.parallel.stateful import GlobalTensor

ENTRY_BYTES = 192
"""Upper bound of a shard's entry in a file's header, without its key."""

ShardDescriptions = Sequence[Any]
"""A rank's shards as JSON: name, dtype and shape of a tensor, and offset and size of its shards."""


@dataclass(frozen=True)
class WritePlan:
    """The entries of the files that this rank writes, by file name, for `writer.write_files`.

    `checksum_block_bytes`: bytes per checksum. `tensors`: on rank 0, torch's metadata of all tensors by name.
    """

    checksum_block_bytes: int
    files: dict[str, list[list[Any]]]
    tensors: Mapping[str, TensorStorageMetadata]

    def shard_locations(self, locations: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return file, first byte and checksums by key, from the `locations` of the writer's response."""
        keys = [(name, entry[0]) for name, entries in self.files.items() for entry in entries]
        return {key: {"file": name, "start": locations[key][0], "sums": locations[key][1]} for name, key in keys}

    def build_manifest(
        self, facts: manifest.Facts, ranks: Sequence[Any], companions: Mapping[str, manifest.StoredFile]
    ) -> manifest.Manifest:
        """Build the manifest on rank 0; `ranks` holds, by rank, the shard locations and the files."""
        locations = {key: location for of_rank, _ in ranks for key, location in of_rank.items()}
        files = {name: manifest.StoredFile(**file) for _, files in ranks for name, file in files.items()}
        stored = {}
        for name, tensor in self.tensors.items():
            shards = tuple(
                manifest.StoredShard(
                    offset=tuple(shard.offsets), size=tuple(shard.sizes), **locations[shard_key(name, shard.offsets)]
                )
                for shard in tensor.chunks
            )
            stored[name] = manifest.StoredTensor.from_torch(tensor.size, tensor.properties.dtype, shards)
        files = {**companions, **files}
        return manifest.Manifest(facts=facts, chunk=self.checksum_block_bytes, files=files, tensors=stored)


def make_write_plan(state: Mapping[str, GlobalTensor], snapshot: Snapshot, file_bytes: int, mesh: Mesh) -> WritePlan:
    """Plan the writes of all ranks. Collective. The plan depends on the layout alone, and serves every save."""
    control = mesh.world.control
    ranks = control.gather(_describe_shards(state), "the plan of checkpoints")
    tensors: dict[str, TensorStorageMetadata] = {}
    shares = None
    if ranks is not None:
        writes, metadata = _assign_writes(ranks)
        tensors = {
            name: tensor
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        size = sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors.values())
        shares = [(indices, checksum_block_bytes(size)) for indices in writes]
    indices, block_bytes = control.scatter(shares, "the plan of checkpoints")
    shards = [(shard_key(name, part.offset), part.data) for name, tensor in state.items() for part in tensor.shards]
    files = _files([shards[index] for index in indices], snapshot, file_bytes, mesh.rank)
    return WritePlan(block_bytes, files, tensors)


def _describe_shards(state: Mapping[str, GlobalTensor]) -> ShardDescriptions:
    """Describe the shards on this rank."""
    return [
        (name, str(tensor.dtype).removeprefix("torch."), tensor.shape, [(p.offset, p.size) for p in tensor.shards])
        for name, tensor in state.items()
    ]


def _assign_writes(ranks: Sequence[ShardDescriptions]) -> tuple[list[list[int]], Metadata]:
    """Assign every shard to one rank: indices of a rank's own shards, by rank; and the metadata of all."""
    local = [_full_plan(descriptions) for descriptions in ranks]
    assigned, metadata = DefaultSavePlanner(False, False).create_global_plan(local)
    places = [{_place(item): index for index, item in enumerate(plan.items)} for plan in local]
    return [[of[_place(item)] for item in plan.items] for of, plan in zip(places, assigned, strict=True)], metadata


def _full_plan(descriptions: ShardDescriptions) -> SavePlan:
    """Return the plan of a rank that writes all of its shards."""
    items = []
    for name, dtype, shape, shards in descriptions:
        properties = TensorProperties(dtype=getattr(torch, dtype))
        for offset, size in shards:
            chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(size))
            data = TensorWriteData(chunk, properties, torch.Size(shape))
            items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def _place(item: WriteItem) -> tuple[str, Any]:
    return item.index.fqn, item.index.offset


def _files(
    shards: Sequence[tuple[str, Tensor]], snapshot: Snapshot, file_bytes: int, rank: int
) -> dict[str, list[list[Any]]]:
    """Distribute shards over files of at most `file_bytes`; a larger shard has a file to itself."""
    files: dict[str, list[list[Any]]] = {}
    free_bytes = 0
    for key, data in shards:
        size = data.nbytes + len(key) + ENTRY_BYTES
        if not files or size > free_bytes:
            name = f"rank-{rank:05d}-{len(files):03d}.safetensors"
            entries, free_bytes = files.setdefault(name, []), file_bytes
        entries.append([key, SAFETENSORS_DTYPES[data.dtype], list(data.shape), snapshot.offset_of(data), data.nbytes])
        free_bytes -= size
    return files
