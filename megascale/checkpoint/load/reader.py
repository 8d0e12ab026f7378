"""Reading stored shards: only the bytes that a layout needs, checked in blocks against their CRC-32."""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.checkpoint.collective_errors import OtherRankError
from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.safetensors_file import MAX_READ_BYTES
from megascale.checkpoint.format.state import Region, missing_region, overlap, shard_key, slices
from megascale.comm.collectives import all_gather
from megascale.comm.group import Group, single_rank_group
from megascale.core.errors import CheckpointError
from megascale.core.storage import Location
from megascale.parallel.stateful import GlobalTensor


class ReadRequest(NamedTuple):
    """Parts of a stored shard of tensor `name`: regions of the shard, each with the tensor that it fills."""

    name: str
    shard: manifest.StoredShard
    parts: list[tuple[Region, Tensor]]


class _Span(NamedTuple):
    """Bytes [start, stop) of a file, in whole checksum blocks, that cover the parts of a request."""

    file: str
    start: int
    stop: int
    request: ReadRequest

    @property
    def byte_range(self) -> tuple[str, int, int]:
        return self[:3]


def plan_reads(path: Location, saved: manifest.Manifest, tensors: Mapping[str, GlobalTensor]) -> list[ReadRequest]:
    """Find the parts of the checkpoint at `path` that fill this rank's shards.

    Raises: CheckpointError for a missing tensor or another shape, DamagedError for a tensor stored in part
    """
    requests: dict[tuple[str, int], ReadRequest] = {}
    for name, tensor in tensors.items():
        if (stored := saved.tensors.get(name)) is None:
            raise CheckpointError(f"{path} has no tensor {name}", hint="it is of another model or optimizer")
        if stored.shape != tensor.shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(stored.shape)} there, {list(tensor.shape)} in this run",
                hint="resume with the [model] section of the run that saved it",
            )
        found = 0
        for shard, (index, source) in product(tensor.shards, enumerate(stored.shards)):
            if (shared := overlap((source.offset, source.size), (shard.offset, shard.size))) is None:
                continue
            size = tuple(end - first for first, end in shared)
            begins, target = (
                tuple(first - start for (first, _), start in zip(shared, offset, strict=True))
                for offset in (source.offset, shard.offset)
            )
            request = requests.setdefault((name, index), ReadRequest(name, source, []))
            request.parts.append(((begins, size), shard.data[slices(target, size)]))
            found += math.prod(size)
        if found != sum(math.prod(shard.size) for shard in tensor.shards):
            raise incomplete(path, name, stored, [(shard.offset, shard.size) for shard in tensor.shards])
    return list(requests.values())


def incomplete(path: Location, name: str, stored: manifest.StoredTensor, wanted: Iterable[Region]) -> CheckpointError:
    """Return the error of a tensor that is stored in part: with the first of the `wanted` regions that lacks one."""
    boxes = [(shard.offset, shard.size) for shard in stored.shards]
    missing = next(filter(None, (missing_region(region, boxes) for region in wanted)), None)
    if missing is None:
        return manifest.DamagedError(f"{path} holds parts of {name} twice")
    text = ", ".join(f"{first}:{first + count}" for first, count in zip(*missing, strict=True))
    return manifest.DamagedError(f"{path} holds only a part of {name} {list(stored.shape)}: it lacks [{text}]")


@dataclass
class CheckpointReader:
    """Reads a complete checkpoint, for any layout; `bytes_read` counts the bytes of this rank.

    A byte range requested by all ranks of `group` is read once: every rank reads a share, then all-gathers. All ranks
    of the group call `read` together.
    """

    path: Location
    saved: manifest.Manifest
    group: Group = field(default_factory=lambda: single_rank_group("alone"))
    device: torch.device | None = None
    bytes_read: int = 0

    def read(self, requests: Iterable[ReadRequest]) -> None:
        """Fill the requested parts, in file order. Adjacent byte ranges are merged into one read.

        Raises: DamagedError for a failed checksum or a missing byte, CheckpointError for unreadable storage
        """
        spans = sorted((self._span(request) for request in requests), key=lambda span: span.byte_range)
        by_rank = self.group.control.all_gather([span.byte_range for span in spans], f"reading {self.path}")
        common = set.intersection(*(set(map(tuple, ranges)) for ranges in by_rank))
        shared = [span for span in spans if span.byte_range in common] if self.group.size > 1 else []
        local = [span for span in spans if span.byte_range not in common] if shared else spans
        for read, group_spans in ((self._read_range_shared, shared), (self._read_range, local)):
            for run in _adjacent(group_spans):
                first = run[0].start
                data = read(self.path / run[0].file, first, run[-1].stop)
                for span in run:
                    self._fill(span, data[span.start - first : span.stop - first])

    def _span(self, request: ReadRequest) -> _Span:
        """Return the checksum blocks from the first to the last requested element."""
        shard, block, strides = request.shard, self.saved.checksum_block_bytes, _strides(request.shard.size)
        itemsize = self.saved.tensors[request.name].torch_dtype.itemsize
        first = min(_element(offset, strides) for (offset, _), _ in request.parts)
        last = max(_element([o + n - 1 for o, n in zip(*part, strict=True)], strides) for part, _ in request.parts)
        start, stop = first * itemsize // block * block, (last * itemsize // block + 1) * block
        stop = min(stop, math.prod(shard.size) * itemsize)
        return _Span(shard.file, shard.start + start, shard.start + stop, request)

    def _read_range(self, path: Location, start: int, stop: int) -> Tensor:
        data = torch.empty(stop - start, dtype=torch.uint8)
        try:
            count = path.read_into(data.numpy().data, start)
        except OSError as error:
            raise manifest.read_error(path, error) from None
        self.bytes_read += count
        if count < len(data):
            raise manifest.DamagedError(f"{path}: it ends too early")
        return data

    def _read_range_shared(self, path: Location, start: int, stop: int) -> Tensor:
        """Read a share of the range and all-gather the shares.

        A share ends in a flag byte, 1 after any error: then every rank raises, and no rank waits in the all-gather.
        """
        size, index = self.group.size, self.group.index
        share = -(-(stop - start) // size)
        part, problem = torch.zeros(share + 1, dtype=torch.uint8), None
        low, high = (min(start + edge * share, stop) for edge in (index, index + 1))
        try:
            part[: high - low] = self._read_range(path, low, high)
        except Exception as error:
            part[share], problem = 1, error
        part = part.to(self.device)
        out = part.new_empty(size * (share + 1))
        all_gather(self.group, out, part, label=path.name)
        parts = out.cpu().view(size, share + 1)
        if problem is not None or bool(parts[:, share].any()):
            raise problem or OtherRankError(f"{path} cannot be read by another rank")
        return parts[:, :share].reshape(-1)[: stop - start]

    def _fill(self, span: _Span, data: Tensor) -> None:
        """Check the CRC-32s of a span, and copy the requested parts."""
        (name, shard, parts), block = span.request, self.saved.checksum_block_bytes
        dtype, start = self.saved.tensors[name].torch_dtype, span.start - shard.start
        first = start // block
        sums = tuple(zlib.crc32(part.numpy()) for part in data.split(block))
        if sums != shard.sums[first : first + len(sums)]:
            key = shard_key(name, shard.offset)
            raise manifest.DamagedError(f"{self.path / shard.file}: the CRC-32 of {key} does not match")
        if data.storage_offset() % dtype.itemsize:
            data = data.clone()
        elements, strides = data.view(dtype), _strides(shard.size)
        base = elements.storage_offset() - start // dtype.itemsize
        for (offset, size), part in parts:
            part.copy_(elements.as_strided(size, strides, base + _element(offset, strides)))


def _adjacent(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    """Group adjacent spans into reads of at most `MAX_READ_BYTES`."""
    run: list[_Span] = []
    for span in spans:
        adjacent = run and (run[-1].file, run[-1].stop) == (span.file, span.start)
        if run and not (adjacent and span.stop - run[0].start <= MAX_READ_BYTES):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _element(offset: Sequence[int], strides: Sequence[int]) -> int:
    return sum(map(operator.mul, offset, strides))


def _strides(size: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor, in elements."""
    return [math.prod(size[dim + 1 :]) for dim in range(len(size))]
