"""The write plan: the tensor shards and files that this rank writes in every save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.safetensors_file import checksum_block_bytes
from megascale.checkpoint.format.state import SAFETENSORS_DTYPES
from megascale.checkpoint.planners import SavePlanner, build_manifest, describe_shards, shard_key, total_bytes
from megascale.checkpoint.save.snapshot import Snapshot
from megascale.comm.mesh import Mesh
from megascale.parallel.stateful import GlobalTensor

ENTRY_BYTES = 192
"""Upper bound of a shard's entry in a file's header, without its key."""


@dataclass(frozen=True)
class WritePlan:
    """Keys of the shards that this rank writes, and the entries of its files by file name, for `writer.write_files`.

    `checksum_block_bytes`: bytes per checksum. `tensor_metadata`: on rank 0, torch's metadata of all tensors.
    """

    keys: Sequence[str]
    checksum_block_bytes: int
    files: dict[str, list[list[Any]]]
    tensor_metadata: Metadata | None

    def shard_locations(self, locations: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return file, first byte and checksums by key, from the `locations` of the writer's response."""
        files = {entry[0]: name for name, entries in self.files.items() for entry in entries}
        return {key: {"file": files[key], "start": locations[key][0], "sums": locations[key][1]} for key in self.keys}

    def build_manifest(
        self, facts: manifest.Facts, ranks: Sequence[Any], companions: Mapping[str, manifest.StoredFile]
    ) -> manifest.Manifest:
        """Build the manifest on rank 0; `ranks` holds, by rank, the shard locations and the files."""
        assert self.tensor_metadata is not None, "rank 0 has it"
        locations = {key: location for of_rank, _ in ranks for key, location in of_rank.items()}
        files = {name: manifest.StoredFile(**file) for _, files in ranks for name, file in files.items()}
        files = {**companions, **files}
        return build_manifest(facts, self.tensor_metadata, locations, files, self.checksum_block_bytes)


def make_write_plan(state: Mapping[str, GlobalTensor], snapshot: Snapshot, file_bytes: int, mesh: Mesh) -> WritePlan:
    """Plan the writes of all ranks. Collective. The plan depends on the layout alone, and serves every save."""
    planner = SavePlanner()
    planner.set_up_planner(state, is_coordinator=mesh.rank == 0)
    control, local = mesh.world.control, planner.create_local_plan()
    ranks = control.gather(describe_shards(state), "the plan of checkpoints")
    metadata, shares = None, None
    if ranks is not None:
        writes, metadata = planner.assign_writes(ranks)
        shares = [(indices, checksum_block_bytes(total_bytes(metadata))) for indices in writes]
    indices, block_bytes = control.scatter(shares, "the plan of checkpoints")
    items = [local.items[index] for index in indices]
    files = _files([(_key(item), planner.resolve_data(item)) for item in items], snapshot, file_bytes, mesh.rank)
    return WritePlan([_key(item) for item in items], block_bytes, files, metadata)


def _key(item: WriteItem) -> str:
    return shard_key(item.index.fqn, item.index.offset or ())


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
