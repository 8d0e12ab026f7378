"""Checkpoints on storage: a fresh folder for each, safetensors shards, and a JSON manifest that is renamed into place
last.

A folder without a manifest is an attempt that did not finish and is never read. Nothing is executed on reading, and
all that is read is checked against its CRC-32: torch's own file writer unpickles, reuses folders and has no checksums.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
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
from megascale.checkpoint.state import Part
from megascale.checkpoint.storage import Location
from megascale.core.errors import CheckpointError

_FOLDER = re.compile(r"step-(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class Stored:
    """A complete checkpoint. `attempt` tells apart several of the same step."""

    path: Location
    step: int
    attempt: int


def complete(folder: Location) -> list[Stored]:
    """The complete checkpoints in a folder, the oldest step first; found by looking, not by a pointer that may be
    stale.

    Raises: CheckpointError
    """
    return sorted(_look(folder, complete=True), key=lambda s: (s.step, s.attempt))


def unfinished(folder: Location) -> list[Stored]:
    """The attempts in a folder that did not finish, or are under way.

    Raises: CheckpointError
    """
    return list(_look(folder, complete=False))


def _look(folder: Location, *, complete: bool) -> Iterator[Stored]:
    try:
        for name in folder.names():
            match = _FOLDER.fullmatch(name)
            if match and (folder / name / manifest.NAME).exists() == complete and (folder / name).is_folder():
                yield Stored(folder / name, int(match.group(1)), int(match.group(2) or 0))
    except OSError as error:
        raise CheckpointError(f"cannot look into {folder}: {error.strerror}", mend="check permissions") from None


def fresh_folder(folder: Location, step: int) -> Location:
    """A folder for a checkpoint that has never been used. It is not made.

    Raises: OSError
    """
    there = set(folder.names())
    names = (f"step-{step:08d}" + (f".{attempt}" if attempt else "") for attempt in itertools.count())
    return folder / next(name for name in names if name not in there)


def remove_unfinished(folder: Location) -> None:
    """Delete attempts that have no manifest; no other process may be writing.

    Raises: CheckpointError
    """
    for attempt in unfinished(folder):
        _remove(attempt.path)


def keep_newest(folder: Location, keep: int, every: int = 0) -> None:
    """Delete all complete checkpoints but the newest `keep`, and those of each step that `every` divides; a `keep` of 0
    keeps all.

    Raises: CheckpointError
    """
    for stored in complete(folder)[:-keep] if keep else []:
        if not every or stored.step % every:
            _remove(stored.path)


def _remove(path: Location) -> None:
    """Delete a checkpoint, its manifest first. Of one that lies elsewhere only the link."""
    try:
        if not (path.local and path.local.is_symlink()):
            (path / manifest.NAME).remove()
        path.remove()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be removed: {error.strerror}", mend="check permissions") from None


# ---- torch.distributed.checkpoint's view
# ------------------------------------------------------------------------------


def manifest_of(
    facts: manifest.Facts,
    metadata: Metadata,
    places: Mapping[tuple[str, torch.Size], Mapping[str, Any]],
    files: dict[str, manifest.File],
    chunk: int,
) -> manifest.Manifest:
    """The manifest of what was planned and written: `places` says of each box, by its tensor's name and its offset,
    where it lies and its checksums.
    """
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        boxes = tuple(
            manifest.Box(offset=tuple(chunk.offsets), size=tuple(chunk.sizes), **places[name, chunk.offsets])
            for chunk in tensor.chunks
        )
        tensors[name] = manifest.Tensor.of(tensor.size, tensor.properties.dtype, boxes)
    return manifest.Manifest(facts=facts, chunk=chunk, files=files, tensors=tensors)


def size_of(metadata: Metadata) -> int:
    """Bytes of all tensors."""
    tensors = [tensor for tensor in metadata.state_dict_metadata.values() if isinstance(tensor, TensorStorageMetadata)]
    return sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors)


RUN_BYTES = 64 << 20
"""What is read at once, at most, but for one box that is larger."""


class Wanted(NamedTuple):
    """Parts of a box of the tensor of this name, by their places in the box."""

    name: str
    box: manifest.Box
    parts: Sequence[Part]


@dataclass(frozen=True)
class _Span:
    """The bytes of a file that are read for what is wanted, with the checksums of their chunks; and of the box the
    format, the strides and where in it each part begins, in numbers.
    """

    wanted: Wanted
    start: int
    stop: int
    sums: tuple[int, ...]
    dtype: torch.dtype
    strides: list[int]
    firsts: list[int]

    def follows(self, other: _Span) -> bool:
        """Whether it begins where the other ends."""
        return (self.wanted.box.file, self.start) == (other.wanted.box.file, other.stop)


class Reader(StorageReader):
    """Reads a complete checkpoint, for any layout. `bytes`: how many it has read."""

    def __init__(self, path: Location, saved: manifest.Manifest) -> None:
        self._path = path
        self._saved = saved
        self.bytes = 0

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        return None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        storage = {}
        for name, tensor in self._saved.tensors.items():
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
            items[item.storage_index.fqn, self._storage[item.storage_index]].append(item)
        wanted = [
            Wanted(name, box, [(tuple(item.storage_offsets), tuple(item.lengths)) for item in found])
            for (name, box), found in items.items()
        ]
        for one, parts in self.read(wanted):
            for item, part in zip(items[one.name, one.box], parts, strict=True):
                planner.resolve_tensor(item).copy_(part)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read(self, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, list[torch.Tensor]]]:
        """What is wanted of boxes, in the order of files. What lies side by side is read at once.

        Raises: DamagedError for what cannot be read or is not what was written
        """
        spans = sorted((self._span(one) for one in wanted), key=lambda span: (span.wanted.box.file, span.start))
        while spans:
            run = [spans.pop(0)]
            while spans and spans[0].follows(run[-1]) and spans[0].stop - run[0].start <= RUN_BYTES:
                run.append(spans.pop(0))
            room = self._bytes(self._path / run[0].wanted.box.file, run[0].start, run[-1].stop)
            for span in run:
                yield span.wanted, self._parts(span, room[span.start - run[0].start : span.stop - run[0].start])

    def _span(self, wanted: Wanted) -> _Span:
        """The chunks from the first to the last that has a number that is wanted."""
        box, chunk = wanted.box, self._saved.chunk
        dtype = getattr(torch, self._saved.tensors[wanted.name].dtype)
        strides = [math.prod(box.size[dim + 1 :]) for dim in range(len(box.size))]
        firsts = [_at(offset, strides) for offset, _ in wanted.parts]
        last = max(_at([o + n - 1 for o, n in zip(*part, strict=True)], strides) for part in wanted.parts)
        low, high = min(firsts) * dtype.itemsize // chunk, last * dtype.itemsize // chunk + 1
        end = min(high * chunk, math.prod(box.size) * dtype.itemsize)
        return _Span(wanted, box.start + low * chunk, box.start + end, box.sums[low:high], dtype, strides, firsts)

    def _bytes(self, path: Location, start: int, stop: int) -> torch.Tensor:
        room = torch.empty(stop - start, dtype=torch.uint8)
        try:
            count = path.read_into(room.numpy().data, start)
        except OSError as error:
            raise manifest.DamagedError(f"{path} cannot be read: {error.strerror}") from None
        self.bytes += count
        if count < len(room):
            raise manifest.DamagedError(f"{path}: it ends too early")
        return room

    def _parts(self, span: _Span, read: torch.Tensor) -> list[torch.Tensor]:
        box = span.wanted.box
        if tuple(zlib.crc32(chunk.numpy()) for chunk in read.split(self._saved.chunk)) != span.sums:
            what = f"{span.wanted.name}@{','.join(map(str, box.offset))} is not what was written"
            raise manifest.DamagedError(f"{self._path / box.file}: {what}")
        if read.storage_offset() % span.dtype.itemsize:
            read = read.clone()
        numbers = read.view(span.dtype)
        base = numbers.storage_offset() - (span.start - box.start) // span.dtype.itemsize
        return [
            numbers.as_strided(size, span.strides, base + first)
            for first, (_, size) in zip(span.firsts, span.wanted.parts, strict=True)
        ]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def _at(place: Sequence[int], strides: Sequence[int]) -> int:
    return sum(map(operator.mul, place, strides))


def key_of(index: MetadataIndex) -> str:
    """The name of a box in its file."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"
