"""Checkpoints without ranks: whole tensors out of one, one of whole tensors, and whether all of one is right."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from megascale.checkpoint import manifest
from megascale.checkpoint.reader import RUN_BYTES, Reader, Wanted
from megascale.checkpoint.shard import CHUNK, Entry, Shard
from megascale.checkpoint.state import FORMATS, WEIGHTS, Progress, slices
from megascale.checkpoint.storage import Location
from megascale.checkpoint.store import complete
from megascale.core.errors import CheckpointError

FILE_BYTES = 2 << 30
"""Of tensors in one file, but for one that is larger."""


def find(path: Location) -> Location:
    """The checkpoint that a path names: its own folder, or the newest complete one of a run.

    Raises: CheckpointError if there is none
    """
    return find_all(path)[0]


def find_all(path: Location) -> list[Location]:
    """The checkpoint that a path names, or all complete ones of a run, the newest first.

    Raises: CheckpointError if there is none
    """
    try:
        if (path / manifest.NAME).exists():
            return [path]
    except OSError as error:
        what = f"cannot look into {path}: {error.strerror}"
        raise CheckpointError(what, mend="its name, who may read it, the network") from None
    for folder in (path / "checkpoints", path):
        if found := complete(folder):
            return [stored.path for stored in reversed(found)]
    raise CheckpointError(f"there is no complete checkpoint in {path}", mend="a checkpoint's folder, or a run's")


def read_tensor(folder: Location, saved: manifest.Manifest, name: str) -> torch.Tensor:
    """A whole tensor of a checkpoint.

    Raises: DamagedError if a part of it is missing or is not what was written
    """
    tensor = saved.tensors[name]
    if sum(math.prod(box.size) for box in tensor.boxes) != math.prod(tensor.shape):
        raise manifest.DamagedError(f"{folder} holds only a part of {name}")
    found = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
    wanted = [Wanted(name, box, [((0,) * len(box.size), box.size)]) for box in tensor.boxes]
    for one, (data,) in Reader(folder, saved).read(wanted):
        found[slices(one.box.offset, one.box.size)] = data
    return found


def verify(folder: Location, saved: manifest.Manifest) -> Iterator[str]:
    """What is wrong with a checkpoint: every file is read, and of one that is not what was written every tensor.

    Raises: CheckpointError if something cannot be read, which says nothing of the checkpoint
    """
    gone: dict[str, str] = {}
    wrong = set()
    for name, file in saved.files.items():
        try:
            if _sum(folder / name, file.bytes) != file.crc32:
                wrong.add(name)
        except manifest.DamagedError as error:
            gone[name] = error.what
    told = set()
    for name, what in gone.items():
        lost = sum(any(box.file == name for box in tensor.boxes) for tensor in saved.tensors.values())
        yield f"{what}; {lost} tensors are in it"
    for name, tensor in saved.tensors.items():
        files = {box.file for box in tensor.boxes}
        if not files & gone.keys() and (files & wrong or not files <= saved.files.keys()):
            try:
                read_tensor(folder, saved, name)
            except manifest.DamagedError as error:
                told |= files
                yield f"{name}: {error.what}"
    for name in sorted(wrong - told):
        yield f"{folder / name}: it is not what was written, beside its tensors"


def _sum(path: Location, size: int) -> int | None:
    """The CRC-32 of a file; None if it has another size.

    Raises: DamagedError if it is not there, CheckpointError if it cannot be read
    """
    found = 0
    room = memoryview(bytearray(min(RUN_BYTES, size)))
    try:
        path.read_into(memoryview(bytearray(1)), 0)  # some file systems say that what is not there has no bytes
        if path.size() != size:
            return None
        for start in range(0, size, RUN_BYTES):
            count = path.read_into(room[: size - start], start)
            found = zlib.crc32(room[:count], found)
    except OSError as error:
        raise manifest.unreadable(path, error) from None
    return found


def write(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], config: dict[str, Any]) -> None:
    """Make a folder that is there a checkpoint of a run that has not begun, with these weights, by our names. One file
    of them at a time is in memory.

    Raises: CheckpointError, OSError
    """
    found: dict[str, manifest.Tensor] = {}
    sizes: dict[str, manifest.File] = {}
    held: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > FILE_BYTES:
            found |= _write_file(folder, held, sizes)
            held = {}
        held[WEIGHTS + name] = tensor
    found |= _write_file(folder, held, sizes)
    facts = manifest.Facts.of(Progress(), config, layout={})
    made = manifest.Manifest(facts=facts, chunk=CHUNK, files=sizes, tensors=found)
    manifest.write(Location(str(folder)), made)


def _write_file(
    folder: Path, tensors: dict[str, torch.Tensor], sizes: dict[str, manifest.File]
) -> dict[str, manifest.Tensor]:
    """Write tensors to one more file, and add that to `sizes`."""
    file = f"weights-{len(sizes):05d}.safetensors"
    entries = []
    for name, tensor in tensors.items():
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        entries.append(Entry(name, FORMATS[tensor.dtype], list(tensor.shape), data))
    shard = Shard(entries, CHUNK)
    Location(str(folder / file)).write_parts(shard.parts)
    sizes[file] = manifest.File(bytes=shard.size, crc32=shard.crc32)
    found = {}
    for name, tensor in tensors.items():
        shape, (start, sums) = tuple(tensor.shape), shard.boxes[name]
        box = manifest.Box(offset=(0,) * len(shape), size=shape, file=file, start=start, sums=tuple(sums))
        found[name] = manifest.Tensor.of(shape, tensor.dtype, (box,))
    return found
