"""Checkpoints without ranks: whole tensors out of one, and one of whole tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megascale.checkpoint import manifest
from megascale.checkpoint.state import WEIGHTS, Progress, slices
from megascale.checkpoint.store import complete, crc32, read_boxes
from megascale.core.errors import CheckpointError

FILE_BYTES = 2 << 30
"""Of tensors in one file, but for one that is larger."""


def find(path: Path) -> Path:
    """The checkpoint that a path names: its own folder, or the newest complete one of a run.

    Raises: CheckpointError if there is none
    """
    if (path / manifest.NAME).is_file():
        return path
    for folder in (path / "checkpoints", path):
        if found := complete(folder):
            return found[-1].path
    raise CheckpointError(f"there is no complete checkpoint in {path}", mend="a checkpoint's folder, or a run's")


def read_tensor(folder: Path, name: str, tensor: manifest.Tensor) -> torch.Tensor:
    """A whole tensor of a checkpoint.

    Raises: CheckpointError if a part of it is missing or is not what was written
    """
    if sum(math.prod(box.size) for box in tensor.boxes) != math.prod(tensor.shape):
        raise CheckpointError(f"{folder} holds only a part of {name}", mend=manifest.BYPASS)
    if len(tensor.boxes) == 1:
        ((_, data),) = read_boxes(folder, tensor.boxes)
        return data
    found = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
    for box, data in read_boxes(folder, tensor.boxes):
        found[slices(box.offset, box.size)] = data
    return found


def write(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], config: dict[str, Any]) -> None:
    """Make a folder that is there a checkpoint of a run that has not begun, with these weights, by our names. One file
    of them at a time is in memory.

    Raises: CheckpointError, OSError
    """
    found: dict[str, manifest.Tensor] = {}
    held: dict[str, torch.Tensor] = {}
    files = 0
    for name, tensor in tensors:
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > FILE_BYTES:
            found |= _write_file(folder, files, held)
            held, files = {}, files + 1
        held[WEIGHTS + name] = tensor
    found |= _write_file(folder, files, held)
    facts = manifest.Facts.of(Progress(), config, layout={})
    manifest.write(folder, manifest.Manifest(facts=facts, tensors=found))


def _write_file(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> dict[str, manifest.Tensor]:
    file = f"weights-{number:05d}.safetensors"
    save_file(tensors, folder / file)
    found = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        box = manifest.Box(offset=(0,) * len(shape), size=shape, file=file, key=name, crc32=crc32(tensor))
        found[name] = manifest.Tensor.of(shape, tensor.dtype, (box,))
    return found
