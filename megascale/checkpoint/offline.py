"""Checkpoints without ranks: read whole tensors, verify all of one, and write one of whole tensors."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.safetensors_file import MAX_READ_BYTES, MIN_CHECKSUM_BLOCK_BYTES, SafetensorsFile
from megascale.checkpoint.format.state import SAFETENSORS_DTYPES, Progress, Region
from megascale.checkpoint.load.reader import CheckpointReader, plan_reads
from megascale.core.storage import Location
from megascale.parallel.stateful import GlobalTensor, TensorShard

TENSORS_INTACT = "its tensors are intact"  # of a file with other bytes than were written

FILE_BYTES = 2 << 30  # bytes of tensors in one file; a larger tensor has a file to itself


def read_tensor(folder: Location, saved: manifest.Manifest, name: str, part: Region | None = None) -> torch.Tensor:
    """Read a tensor in its global shape, or its region `part` (offset, size).

    Raises: DamagedError if a part of it is missing or fails its checksum
    """
    tensor = saved.tensors[name]
    offset, size = part or ((0,) * len(tensor.shape), tensor.shape)
    data = torch.empty(size, dtype=tensor.torch_dtype)
    wanted = GlobalTensor(tensor.shape, tensor.torch_dtype, [TensorShard(offset, size, data)])
    CheckpointReader(folder, saved).read(plan_reads(folder, saved, {name: wanted}))
    return data


def verify(folder: Location, saved: manifest.Manifest) -> Iterator[str]:
    """Read every file and yield the problems; in a damaged file every tensor is checked on its own, and of every tensor
    that all of it is there.

    Raises: CheckpointError if a file cannot be read, which proves no damage
    """
    unreadable: dict[str, str] = {}
    damaged = set()
    of_tensors = {shard.file for tensor in saved.tensors.values() for shard in tensor.shards}
    for name, file in saved.files.items():
        try:
            if _file_crc32(folder / name, file.bytes) != file.crc32:
                damaged.add(name)
        except manifest.DamagedError as error:
            unreadable[name] = error.message
    for name, what in unreadable.items():
        lost = sum(any(shard.file == name for shard in tensor.shards) for tensor in saved.tensors.values())
        yield f"{what}; {lost} tensors are in it" if name in of_tensors else what
    explained = set()
    for name, tensor in saved.tensors.items():
        files = {shard.file for shard in tensor.shards}
        whole = sum(math.prod(shard.size) for shard in tensor.shards) == math.prod(tensor.shape)
        suspect = files & damaged or not files <= saved.files.keys() or not whole
        if suspect and not files & unreadable.keys():
            try:
                read_tensor(folder, saved, name)
            except manifest.DamagedError as error:
                explained |= files
                yield f"{name}: {error.message}"
    for name in sorted(damaged - explained):
        though = f", though {TENSORS_INTACT}" if name in of_tensors else ""
        yield f"{folder / name}: its size or CRC-32 does not match{though}"


def _file_crc32(path: Location, size: int) -> int | None:
    """Return the CRC-32 of a file; None if it has another size.

    Raises: DamagedError if the file is missing, CheckpointError if unreadable
    """
    checksum = 0
    buffer = memoryview(bytearray(min(MAX_READ_BYTES, size)))
    try:
        path.read_into(memoryview(bytearray(1)), 0)  # in some file systems a missing file has size 0
        if path.size() != size:
            return None
        for start in range(0, size, MAX_READ_BYTES):
            count = path.read_into(buffer[: size - start], start)
            checksum = zlib.crc32(buffer[:count], checksum)
    except OSError as error:
        raise manifest.read_error(path, error) from None
    return checksum


def write_state(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    config: dict[str, Any],
    companions: Mapping[str, manifest.StoredFile] | None = None,
    progress: Progress = Progress(),
) -> None:
    """Write a checkpoint of whole tensors, by name of state (`weights.NAME`, `exp_avg.NAME`, ...), into an existing
    folder. One file at a time is in memory. `companions`: further files, which are there.

    Raises: CheckpointError, OSError
    """
    stored: dict[str, manifest.StoredTensor] = {}
    files: dict[str, manifest.StoredFile] = {}
    pending: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > FILE_BYTES:
            stored |= _write_file(folder, pending, files)
            pending = {}
        pending[name] = tensor
    stored |= _write_file(folder, pending, files)
    facts = manifest.Facts.for_run(progress, config, layout={})
    files = {**(companions or {}), **files}
    made = manifest.Manifest(facts=facts, chunk=MIN_CHECKSUM_BLOCK_BYTES, files=files, tensors=stored)
    manifest.write(Location(str(folder)), made)


def _write_file(
    folder: Path, tensors: dict[str, torch.Tensor], files: dict[str, manifest.StoredFile]
) -> dict[str, manifest.StoredTensor]:
    """Write tensors to one more file, and add the file to `files`."""
    name = f"state-{len(files):05d}.safetensors"
    entries = []
    for key, tensor in tensors.items():
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        entries.append((key, SAFETENSORS_DTYPES[tensor.dtype], list(tensor.shape), data))
    file = SafetensorsFile(name, entries, MIN_CHECKSUM_BLOCK_BYTES)
    Location(str(folder / name)).write_chunks(file.iter_bytes)
    files[name] = manifest.StoredFile(bytes=file.size, crc32=file.crc32)
    stored = {}
    for key, tensor in tensors.items():
        shape = tuple(tensor.shape)
        shard = manifest.StoredShard(offset=(0,) * len(shape), size=shape, **file.locations[key])
        stored[key] = manifest.StoredTensor.from_torch(shape, tensor.dtype, (shard,))
    return stored
