"""The write plan: the tensor shards and files that this rank writes in every save.

torch's planner assigns every replicated shard to one rank, balances the bytes, and proves that the shards of a tensor
fill it without overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.safetensors_file import checksum_block_bytes
from megascale.checkpoint.format.state import SAFETENSORS_DTYPES, shard_key

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from megascale.checkpoint.save.snapshot import Snapshot
    from megascale.comm.mesh import Mesh
    from megascale.parallel.stateful import GlobalTensor

ENTRY_BYTES = 192  # upper bound of a shard's entry in a file's header, without its key


@dataclass(frozen=True)
class WritePlan:
    """The entries of the files that this rank writes, by file name, for `writer.write_files`.

    `checksum_block_bytes`: bytes per checksum. `tensors`: on rank 0, torch's metadata of all tensors by name.
    """

    checksum_block_bytes: int
    files: dict[str, list[list[Any]]]
    tensors: Mapping[str, TensorStorageMetadata]

    def build_manifest(
        self, facts: manifest.Facts, written: Sequence[Any], companions: Mapping[str, manifest.StoredFile]
    ) -> manifest.Manifest:
        """Build the manifest on rank 0. `written`: by rank, the response of `writer.write_files`."""
        locations = {key: location for of_rank in written for key, location in of_rank["locations"].items()}
        files = {name: manifest.StoredFile(**file) for of_rank in written for name, file in of_rank["files"].items()}
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
    tensors: dict[str, TensorStorageMetadata] = {}
    shares = None
    described = [
        (name, str(tensor.dtype).removeprefix("torch."), tensor.shape, [(p.offset, p.size) for p in tensor.shards])
        for name, tensor in state.items()
    ]
    ranks = control.gather(described, "the plan of checkpoints")
    if ranks is not None:
        writes, tensors = _assign_writes(ranks)
        size = sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors.values())
        shares = [(indices, checksum_block_bytes(size)) for indices in writes]
    indices, block_bytes = control.scatter(shares, "the plan of checkpoints")
    shards = [(shard_key(name, part.offset), part.data) for name, tensor in state.items() for part in tensor.shards]
    files = _files([shards[index] for index in indices], snapshot, file_bytes, mesh.rank)
    return WritePlan(block_bytes, files, tensors)


def _assign_writes(ranks: Sequence[Any]) -> tuple[list[list[int]], dict[str, TensorStorageMetadata]]:
    """Assign every shard to one rank: indices of a rank's own shards, by rank; and the metadata of all tensors by name.
    `ranks`: each rank's shards as JSON: name, dtype and shape of a tensor, and offset and size of its shards.
    """
    # here: torch's planners take a second to import, and other ranks need none
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    local = []
    for described in ranks:
        items = []
        for name, dtype, shape, shards in described:
            properties = TensorProperties(dtype=getattr(torch, dtype))
            for offset, size in shards:
                chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(size))
                data = TensorWriteData(chunk, properties, torch.Size(shape))
                items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
        local.append(SavePlan(items))
    assigned, metadata = DefaultSavePlanner(False, False).create_global_plan(local)
    places = [{(item.index.fqn, item.index.offset): index for index, item in enumerate(plan.items)} for plan in local]
    writes = [
        [of_rank[item.index.fqn, item.index.offset] for item in plan.items]
        for of_rank, plan in zip(places, assigned, strict=True)
    ]
    found = metadata.state_dict_metadata.items()
    return writes, {name: tensor for name, tensor in found if isinstance(tensor, TensorStorageMetadata)}


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
