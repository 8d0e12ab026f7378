"""Reading a checkpoint: for any layout, only the bytes that are wanted, each compared with its checksum."""

from __future__ import annotations

import math
import operator
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
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
from megascale.checkpoint.together import OtherRankError
from megascale.comm.collectives import all_gather
from megascale.comm.group import Group, alone

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

    @property
    def place(self) -> tuple[str, int, int]:
        """File, and from where to where."""
        return self.wanted.box.file, self.start, self.stop


class Reader(StorageReader):
    """Reads a complete checkpoint, for any layout. `bytes`: how many it has read.

    What all of `group` want each of them reads a part of, and gathers the others': all call `read_data` together.
    """

    def __init__(
        self, path: Location, saved: manifest.Manifest, group: Group | None = None, device: torch.device | None = None
    ) -> None:
        self._path = path
        self._saved = saved
        self._group = group or alone("alone")
        self._device = device
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

        Raises: DamagedError for what is not what was written, CheckpointError for what cannot be read
        """
        spans = sorted((self._span(one) for one in wanted), key=lambda span: span.place)
        everyone = self._group.control.gather([span.place for span in spans], f"reading {self._path}")
        every = set.intersection(*(set(map(tuple, places)) for places in everyone))
        shared = [span for span in spans if span.place in every] if self._group.size > 1 else []
        own = [span for span in spans if span.place not in every] if shared else spans
        for read, some in ((self._share, shared), (self._bytes, own)):
            for run in _runs(some):
                room = read(self._path / run[0].wanted.box.file, run[0].start, run[-1].stop)
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
            raise manifest.unreadable(path, error) from None
        self.bytes += count
        if count < len(room):
            raise manifest.DamagedError(f"{path}: it ends too early")
        return room

    def _share(self, path: Location, start: int, stop: int) -> torch.Tensor:
        """Bytes of which each rank of the group reads a part. If one cannot, every rank raises: a byte says so, of
        whatever went wrong, for the others wait.
        """
        size, index = self._group.size, self._group.index
        each = -(-(stop - start) // size)
        part, problem = torch.zeros(each + 1, dtype=torch.uint8), None
        low, high = (min(start + edge * each, stop) for edge in (index, index + 1))
        try:
            part[: high - low] = self._bytes(path, low, high)
        except Exception as error:
            part[each], problem = 1, error
        part = part.to(self._device)
        out = part.new_empty(size * (each + 1))
        all_gather(self._group, out, part, what=path.name)
        parts = out.cpu().view(size, each + 1)
        if problem is not None or bool(parts[:, each].any()):
            raise problem or OtherRankError(f"{path} cannot be read by another rank")
        return parts[:, :each].reshape(-1)[: stop - start]

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


def _runs(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    """Spans that lie side by side, together."""
    run: list[_Span] = []
    for span in spans:
        beside = run and run[-1].place[::2] == (span.wanted.box.file, span.start)
        if run and not (beside and span.stop - run[0].start <= RUN_BYTES):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _at(place: Sequence[int], strides: Sequence[int]) -> int:
    return sum(map(operator.mul, place, strides))
