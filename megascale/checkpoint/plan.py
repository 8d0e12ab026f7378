"""The planners of torch.distributed.checkpoint over `GlobalTensor`s.

torch's planner finds which rank writes a piece that several hold, balances them, proves that the pieces of each tensor
fill it without overlap, and on loading which stored boxes a wanted box meets. Only the description of our pieces is
here.
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

from megascale.checkpoint.manifest import DamagedError
from megascale.checkpoint.state import GlobalTensor, slices
from megascale.checkpoint.storage import Location
from megascale.core.errors import CheckpointError

State = Mapping[str, GlobalTensor]


Description = Sequence[Any]
"""JSON of what a rank holds: of each tensor its name, type and shape, and offset and size of each piece."""


def described(state: State) -> Description:
    """Describe the pieces of tensors that this rank holds."""
    return [
        (name, str(tensor.dtype).removeprefix("torch."), tensor.shape, [(p.offset, p.size) for p in tensor.pieces])
        for name, tensor in state.items()
    ]


def plan_of(held: Description) -> SavePlan:
    """The plan of a rank that would write all that it holds."""
    items = []
    for name, dtype, shape, pieces in held:
        properties = TensorProperties(dtype=getattr(torch, dtype))
        for offset, size in pieces:
            data = TensorWriteData(_chunk(offset, size), properties, torch.Size(shape))
            items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def _place(item: WriteItem) -> tuple[str, Any]:
    return item.index.fqn, item.index.offset


def _chunk(offset: Sequence[int], size: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(size))


def _by_place(state: State) -> dict[tuple[str, torch.Size], torch.Tensor]:
    return {(name, torch.Size(p.offset)): p.data for name, tensor in state.items() for p in tensor.pieces}


class SavePlanner(DefaultSavePlanner):
    """Plans which of this rank's pieces it writes."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: State, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._state = state_dict
        self._data = _by_place(state_dict)
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = plan_of(described(self._state))
        return self.plan

    def share_out(self, ranks: Sequence[Description]) -> tuple[list[list[int]], Metadata]:
        """Which of its items each rank writes, by their numbers in its own plan, and what all write together."""
        local = [plan_of(each) for each in ranks]
        shared, metadata = self.create_global_plan(local)
        numbers = [{_place(item): number for number, item in enumerate(plan.items)} for plan in local]
        kept = [[of[_place(item)] for item in plan.items] for of, plan in zip(numbers, shared, strict=True)]
        return kept, metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        offset = write_item.index.offset
        assert offset is not None, "every piece has an offset"
        return self._data[write_item.index.fqn, offset]


class LoadPlanner(DefaultLoadPlanner):
    """Plans which boxes that are stored at `path` fill this rank's pieces.

    Raises: CheckpointError for a tensor that is missing or has another shape, DamagedError for one that is not stored
    as a whole.
    """

    def __init__(self, path: Location) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._path = path

    def set_up_planner(self, state_dict: State, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._state = state_dict
        self._data = _by_place(state_dict)
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "the reader gives the metadata"
        items: list[ReadItem] = []
        for name, tensor in self._state.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(f"{self._path} has no tensor {name}", mend="it is of another model or optimizer")
            if tuple(stored.size) != tensor.shape:
                raise CheckpointError(
                    f"{self._path}: {name} has shape {list(stored.size)} there, {list(tensor.shape)} in this run",
                    mend="resume with the [model] section that it was saved with",
                )
            found = create_read_items_for_chunk_list(
                name, stored, [_chunk(piece.offset, piece.size) for piece in tensor.pieces]
            )
            wanted = sum(math.prod(piece.size) for piece in tensor.pieces)
            if sum(math.prod(item.lengths) for item in found) != wanted:
                raise DamagedError(f"{self._path} holds only a part of {name}")
            items += found
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        offset = read_item.dest_index.offset
        assert offset is not None, "every piece has an offset"
        return self._data[read_item.dest_index.fqn, offset][slices(read_item.dest_offsets, read_item.lengths)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        return None
