"""Reading stored shards: only the bytes that a layout needs, checked in blocks against their CRC-32."""

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

from megascale.checkpoint.collective_errors import OtherRankError
from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.safetensors_file import MAX_READ_BYTES
from megascale.checkpoint.format.state import Region
from megascale.checkpoint.planners import shard_key
from megascale.comm.collectives import all_gather
from megascale.comm.group import Group, single_rank_group
from megascale.core.storage import Location


class ReadRequest(NamedTuple):
    """Parts of a stored shard of tensor `name`, as regions of the shard."""

    name: str
    shard: manifest.StoredShard
    parts: Sequence[Region]


@dataclass(frozen=True)
class _ReadSpan:
    """Bytes [start, stop) of a file, in whole checksum blocks, that cover the parts of a request.

    `sums`: CRC-32 of the blocks. `dtype` and `strides` are the shard's, `part_starts` the first element of the parts
    within the shard.
    """

    request: ReadRequest
    start: int
    stop: int
    sums: tuple[int, ...]
    dtype: torch.dtype
    strides: list[int]
    part_starts: list[int]

    @property
    def byte_range(self) -> tuple[str, int, int]:
        """File, start and stop."""
        return self.request.shard.file, self.start, self.stop


class CheckpointReader(StorageReader):
    """Reads a complete checkpoint, for any layout; `bytes_read` counts the bytes of this rank.

    A byte range requested by all ranks of `group` is read once: every rank reads a share, then all-gathers. All ranks
    of the group call `read_data` together.
    """

    def __init__(
        self, path: Location, saved: manifest.Manifest, group: Group | None = None, device: torch.device | None = None
    ) -> None:
        self._path = path
        self._saved = saved
        self._group = group or single_rank_group("alone")
        self._device = device
        self.bytes_read = 0

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        return None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        storage = {}
        for name, tensor in self._saved.tensors.items():
            chunks = []
            for index, shard in enumerate(tensor.shards):
                chunks.append(ChunkStorageMetadata(torch.Size(shard.offset), torch.Size(shard.size)))
                storage[MetadataIndex(name, shard.offset, index)] = shard
            properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return Metadata(tensors, storage_data=storage)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._storage: dict[MetadataIndex, manifest.StoredShard] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items = defaultdict(list)
        for item in plan.items:
            items[item.storage_index.fqn, self._storage[item.storage_index]].append(item)
        requests = [
            ReadRequest(name, shard, [(tuple(item.storage_offsets), tuple(item.lengths)) for item in shard_items])
            for (name, shard), shard_items in items.items()
        ]
        for request, parts in self.read_parts(requests):
            for item, part in zip(items[request.name, request.shard], parts, strict=True):
                planner.resolve_tensor(item).copy_(part)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_parts(self, requests: Iterable[ReadRequest]) -> Iterator[tuple[ReadRequest, list[torch.Tensor]]]:
        """Read the requested parts, in file order. Adjacent byte ranges are merged into one read.

        Raises: DamagedError for a failed checksum or a missing byte, CheckpointError for unreadable storage
        """
        spans = sorted((self._span(request) for request in requests), key=lambda span: span.byte_range)
        by_rank = self._group.control.all_gather([span.byte_range for span in spans], f"reading {self._path}")
        common = set.intersection(*(set(map(tuple, ranges)) for ranges in by_rank))
        shared = [span for span in spans if span.byte_range in common] if self._group.size > 1 else []
        local = [span for span in spans if span.byte_range not in common] if shared else spans
        for read, group_spans in ((self._read_range_shared, shared), (self._read_range, local)):
            for run in _adjacent(group_spans):
                first = run[0].start
                data = read(self._path / run[0].request.shard.file, first, run[-1].stop)
                for span in run:
                    yield span.request, self._parts(span, data[span.start - first : span.stop - first])

    def _span(self, request: ReadRequest) -> _ReadSpan:
        """Return the checksum blocks from the first to the last requested element."""
        shard, block = request.shard, self._saved.checksum_block_bytes
        dtype = getattr(torch, self._saved.tensors[request.name].dtype)
        strides = [math.prod(shard.size[dim + 1 :]) for dim in range(len(shard.size))]
        starts = [_element(offset, strides) for offset, _ in request.parts]
        last = max(_element([o + n - 1 for o, n in zip(*part, strict=True)], strides) for part in request.parts)
        low, high = min(starts) * dtype.itemsize // block, last * dtype.itemsize // block + 1
        end = min(high * block, math.prod(shard.size) * dtype.itemsize)
        return _ReadSpan(
            request, shard.start + low * block, shard.start + end, shard.sums[low:high], dtype, strides, starts
        )

    def _read_range(self, path: Location, start: int, stop: int) -> torch.Tensor:
        data = torch.empty(stop - start, dtype=torch.uint8)
        try:
            count = path.read_into(data.numpy().data, start)
        except OSError as error:
            raise manifest.read_error(path, error) from None
        self.bytes_read += count
        if count < len(data):
            raise manifest.DamagedError(f"{path}: it ends too early")
        return data

    def _read_range_shared(self, path: Location, start: int, stop: int) -> torch.Tensor:
        """Read a share of the range and all-gather the shares.

        A share ends in a flag byte, 1 after any error: then every rank raises, and no rank waits in the all-gather.
        """
        size, index = self._group.size, self._group.index
        share = -(-(stop - start) // size)
        part, problem = torch.zeros(share + 1, dtype=torch.uint8), None
        low, high = (min(start + edge * share, stop) for edge in (index, index + 1))
        try:
            part[: high - low] = self._read_range(path, low, high)
        except Exception as error:
            part[share], problem = 1, error
        part = part.to(self._device)
        out = part.new_empty(size * (share + 1))
        all_gather(self._group, out, part, label=path.name)
        parts = out.cpu().view(size, share + 1)
        if problem is not None or bool(parts[:, share].any()):
            raise problem or OtherRankError(f"{path} cannot be read by another rank")
        return parts[:, :share].reshape(-1)[: stop - start]

    def _parts(self, span: _ReadSpan, data: torch.Tensor) -> list[torch.Tensor]:
        """Check the CRC-32s of a span and return views of the requested parts."""
        shard = span.request.shard
        if tuple(zlib.crc32(block.numpy()) for block in data.split(self._saved.checksum_block_bytes)) != span.sums:
            key = shard_key(span.request.name, shard.offset)
            raise manifest.DamagedError(f"{self._path / shard.file}: the CRC-32 of {key} does not match")
        if data.storage_offset() % span.dtype.itemsize:
            data = data.clone()
        elements = data.view(span.dtype)
        base = elements.storage_offset() - (span.start - shard.start) // span.dtype.itemsize
        return [
            elements.as_strided(size, span.strides, base + start)
            for start, (_, size) in zip(span.part_starts, span.request.parts, strict=True)
        ]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def _adjacent(spans: Iterable[_ReadSpan]) -> Iterator[list[_ReadSpan]]:
    """Group adjacent spans into reads of at most `MAX_READ_BYTES`."""
    run: list[_ReadSpan] = []
    for span in spans:
        adjacent = run and run[-1].byte_range[::2] == (span.request.shard.file, span.start)
        if run and not (adjacent and span.stop - run[0].start <= MAX_READ_BYTES):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _element(offset: Sequence[int], strides: Sequence[int]) -> int:
    """Return the index of the element at `offset` in row-major order."""
    return sum(map(operator.mul, offset, strides))
