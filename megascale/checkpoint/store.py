"""Checkpoints on disk: a fresh folder for each, safetensors shards, and a JSON manifest that is renamed into place
last.

A folder without a manifest is an attempt that did not finish and is never read. Nothing is executed on reading, and
every tensor is checked against its CRC-32: torch's own file writer unpickles, reuses folders and has no checksums.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from megascale.checkpoint import manifest
from megascale.checkpoint.state import slices
from megascale.core.errors import CheckpointError

_FOLDER = re.compile(r"step-(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class Stored:
    """A complete checkpoint. `attempt` tells apart several of the same step."""

    path: Path
    step: int
    attempt: int


def complete(folder: Path) -> list[Stored]:
    """The complete checkpoints in a folder, the oldest step first; found by looking, not by a pointer that may be
    stale.
    """
    found = []
    for path in folder.glob("step-*"):
        match = _FOLDER.fullmatch(path.name)
        if match and (path / manifest.NAME).is_file():
            found.append(Stored(path, int(match.group(1)), int(match.group(2) or 0)))
    return sorted(found, key=lambda s: (s.step, s.attempt))


def fresh_folder(folder: Path, step: int) -> Path:
    """A folder for a checkpoint that has never been used. It is not made."""
    names = (f"step-{step:08d}" + (f".{attempt}" if attempt else "") for attempt in itertools.count())
    return next(folder / name for name in names if not os.path.lexists(folder / name))


def remove_unfinished(folder: Path) -> None:
    """Delete attempts that have no manifest; no other process may be writing.

    Raises: CheckpointError
    """
    for path in folder.glob("step-*"):
        if _FOLDER.fullmatch(path.name) and path.is_dir() and not (path / manifest.NAME).exists():
            _remove(path)


def keep_newest(folder: Path, keep: int, every: int = 0) -> None:
    """Delete all complete checkpoints but the newest `keep`, and those of each step that `every` divides; a `keep` of 0
    keeps all.

    Raises: CheckpointError
    """
    for stored in complete(folder)[:-keep] if keep else []:
        if not every or stored.step % every:
            _remove(stored.path)


def _remove(path: Path) -> None:
    """Delete a checkpoint, its manifest first. Of one that lies elsewhere only the link."""
    try:
        if path.is_symlink():
            path.unlink()
        else:
            (path / manifest.NAME).unlink(missing_ok=True)
            shutil.rmtree(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be removed: {error.strerror}", mend="check permissions") from None


# ---- torch.distributed.checkpoint's view
# ------------------------------------------------------------------------------


def manifest_of(
    facts: manifest.Facts, metadata: Metadata, places: Mapping[tuple[str, torch.Size], Mapping[str, Any]]
) -> manifest.Manifest:
    """The manifest of what was planned and written: `places` says of each box, by its tensor's name and its offset,
    file, key and checksum.
    """
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        boxes = tuple(
            manifest.Box(offset=tuple(chunk.offsets), size=tuple(chunk.sizes), **places[name, chunk.offsets])
            for chunk in tensor.chunks
        )
        tensors[name] = manifest.Tensor.of(tensor.size, tensor.properties.dtype, boxes)
    return manifest.Manifest(facts=facts, tensors=tensors)


class Reader(StorageReader):
    """Reads a complete checkpoint, for any layout."""

    def __init__(self, path: Path, tensors: Mapping[str, manifest.Tensor]) -> None:
        self._path = path
        self._tensors = tensors

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        return None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        storage = {}
        for name, tensor in self._tensors.items():
            chunks = []
            for number, box in enumerate(tensor.boxes):
                chunks.append(ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)))
                storage[MetadataIndex(name, box.offset, number)] = box
            properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return Metadata(tensors, storage_data=storage)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._storage: dict[MetadataIndex, manifest.Box] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items = defaultdict(list)
        for item in plan.items:
            items[self._storage[item.storage_index]].append(item)
        for box, data in read_boxes(self._path, items):
            for item in items[box]:
                planner.resolve_tensor(item).copy_(data[slices(item.storage_offsets, item.lengths)])
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def read_boxes(folder: Path, boxes: Iterable[manifest.Box]) -> Iterator[tuple[manifest.Box, torch.Tensor]]:
    """Boxes of a checkpoint, file by file, each checked.

    Raises: CheckpointError for one that cannot be read or is not what was written
    """
    by_file = defaultdict(list)
    for box in boxes:
        by_file[box.file].append(box)
    for file, wanted in by_file.items():
        path = folder / file
        try:
            with safe_open(path, framework="pt") as shard:
                for box in wanted:
                    data = shard.get_tensor(box.key)
                    if tuple(data.shape) != box.size or crc32(data) != box.crc32:
                        raise CheckpointError(f"{path}: {box.key} is not what was written", mend=manifest.BYPASS)
                    yield box, data
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}", mend=manifest.BYPASS) from None


def key_of(index: MetadataIndex) -> str:
    """The name of a box in its file."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def crc32(tensor: torch.Tensor) -> int:
    """The checksum of a tensor's numbers."""
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
