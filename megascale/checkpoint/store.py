"""Checkpoints on storage: a fresh folder for each, safetensors shards, and a JSON manifest that is renamed into place
last.

A folder without a manifest is an attempt that did not finish and is never read. Nothing is executed on reading, and
all that is read is checked against its CRC-32: torch's own file writer unpickles, reuses folders and has no checksums.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megascale.checkpoint import manifest
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
        what = f"cannot look into {error.filename or folder}: {error.strerror}"
        raise CheckpointError(what, mend="checkpoint.dir, who may read it, the network") from None


def fresh_folder(folder: Location, step: int) -> Location:
    """A folder for a checkpoint, under a name that nothing has. It is not made.

    Raises: OSError
    """
    there = set(folder.names())
    names = (f"step-{step:08d}" + (f".{attempt}" if attempt else "") for attempt in itertools.count())
    return folder / next(name for name in names if name not in there)


def remove_unfinished(folder: Location) -> list[str]:
    """Delete attempts that have no manifest; no other process may be writing. Returns what could not be deleted, which
    is in nobody's way.

    Raises: CheckpointError if the folder cannot be read
    """
    return [problem.what for problem in _remove_all(attempt.path for attempt in unfinished(folder))]


def keep_newest(folder: Location, keep: int, every: int = 0, besides: Collection[Location] = ()) -> None:
    """Delete all complete checkpoints but the newest `keep`, and those of each step that `every` divides; a `keep` of 0
    keeps all. Those in `besides`, which are damaged, stay, and do not count.

    Raises: CheckpointError if some could not be deleted; the others are
    """
    counted = [stored for stored in complete(folder) if stored.path not in besides]
    old = [stored.path for stored in (counted[:-keep] if keep else []) if not every or stored.step % every]
    if problems := _remove_all(old):
        others = f", nor can {len(problems) - 1} more" if len(problems) > 1 else ""
        raise CheckpointError(problems[0].what + others, mend=problems[0].mend)


def _remove_all(paths: Iterable[Location]) -> list[CheckpointError]:
    """Delete those that can be. Returns why the others could not."""
    problems = []
    for path in paths:
        try:
            _remove(path)
        except CheckpointError as error:
            problems.append(error)
    return problems


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
    places: Mapping[str, Mapping[str, Any]],
    files: dict[str, manifest.File],
    chunk: int,
) -> manifest.Manifest:
    """The manifest of what was planned and written: `places` says of each box, by its name, where it lies and its
    checksums.
    """
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        boxes = tuple(
            manifest.Box(offset=tuple(chunk.offsets), size=tuple(chunk.sizes), **places[_key(name, chunk.offsets)])
            for chunk in tensor.chunks
        )
        tensors[name] = manifest.Tensor.of(tensor.size, tensor.properties.dtype, boxes)
    return manifest.Manifest(facts=facts, chunk=chunk, files=files, tensors=tensors)


def size_of(metadata: Metadata) -> int:
    """Bytes of all tensors."""
    tensors = [tensor for tensor in metadata.state_dict_metadata.values() if isinstance(tensor, TensorStorageMetadata)]
    return sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors)


def key_of(index: MetadataIndex) -> str:
    """The name of a box in its file."""
    return _key(index.fqn, index.offset or ())


def _key(name: str, offset: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, offset))}"
