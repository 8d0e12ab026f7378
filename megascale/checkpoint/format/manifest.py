"""The manifest of a checkpoint, in JSON: facts of the run, files, and the location of every shard of every tensor.

The manifest is renamed into place last: a folder with a manifest is complete. The file also holds the CRC-32 of the
manifest's text.
"""

from __future__ import annotations

import json
import platform
import re
import socket
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

import megascale
from megascale.checkpoint.format.state import Progress
from megascale.config.renamed import with_present_names
from megascale.core.errors import CheckpointError
from megascale.core.limits import os_error_hint
from megascale.core.storage import WRITE_HINT, Location

NAME = "manifest.json"
FORMAT = 2
_BEFORE = b'{"format": %d, "crc32": %d, "manifest":\n'
_BEGINS = re.compile(rb'\{"format": (\d+), "crc32": (\d+), "manifest":\n')
_AFTER = b"}\n"
VERSION_HINT = "use the version that wrote it"


class DamagedError(CheckpointError):
    """A checkpoint is not as written: a file is missing, too short, or fails its CRC-32."""

    def __init__(self, what: str, *, hint: str = "megascale ckpt verify says whether that is all") -> None:
        super().__init__(what, hint=hint)


class _FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True)


FileName = Annotated[str, Field(pattern=r"^[\w.-]+$")]
"""Name of a file in the checkpoint's own folder."""


class StoredShard(_FrozenModel):
    """A shard of a tensor: offset and size in elements, its file, and the first byte of its elements in the file.

    `sums`: the CRC-32 of every checksum block; the last block may be shorter.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: FileName
    start: int
    sums: tuple[int, ...]


class StoredFile(_FrozenModel):
    """Size and CRC-32 of a file."""

    bytes: int
    crc32: int


class StoredTensor(_FrozenModel):
    """Shape, torch dtype and shards of a tensor; the shards are `boxes` in JSON."""

    shape: tuple[int, ...]
    dtype: Literal["float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8"]
    shards: tuple[StoredShard, ...] = Field(alias="boxes")

    @model_validator(mode="after")
    def _shards_lie_within_shape(self) -> StoredTensor:
        for shard in self.shards:
            sides = zip(shard.offset, shard.size, self.shape, strict=False)
            if not len(shard.offset) == len(shard.size) == len(self.shape) or shard.start < 0:
                raise ValueError(
                    f"a shard of {len(shard.size)} dimensions at byte {shard.start}, shape {list(self.shape)}"
                )
            if any(offset < 0 or size < 0 or offset + size > dim_size for offset, size, dim_size in sides):
                raise ValueError(f"a shard beyond shape {list(self.shape)}: {list(shard.size)} at {list(shard.offset)}")
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @classmethod
    def from_torch(cls, shape: Sequence[int], dtype: torch.dtype, shards: tuple[StoredShard, ...]) -> StoredTensor:
        name: Any = str(dtype).removeprefix("torch.")
        return cls(shape=tuple(shape), dtype=name, boxes=shards)


class Facts(_FrozenModel):
    """The run behind a checkpoint: progress, resolved configuration with present names, layout, versions and host."""

    progress: Progress
    config: Annotated[dict[str, Any], AfterValidator(with_present_names)]
    layout: dict[str, int]
    versions: dict[str, str]
    host: str

    @classmethod
    def for_run(cls, progress: Progress, config: dict[str, Any], layout: dict[str, int]) -> Facts:
        versions = {"megascale": megascale.__version__, "torch": torch.__version__, "python": platform.python_version()}
        host = socket.gethostname()
        return cls(progress=replace(progress), config=config, layout=layout, versions=versions, host=host)


class Manifest(_FrozenModel):
    """Facts of the run, files by name, and tensors by global name.

    `checksum_block_bytes`, `chunk` in JSON: a shard has a checksum for every block of this size.
    """

    facts: Facts
    checksum_block_bytes: int = Field(alias="chunk", gt=0)
    files: dict[FileName, StoredFile]
    tensors: dict[str, StoredTensor]


def write(folder: Location, manifest: Manifest) -> None:
    """Write the manifest, and so complete the checkpoint. Raises: CheckpointError if writing fails"""
    body = manifest.model_dump_json(by_alias=True).encode()
    try:
        (folder / NAME).write(_BEFORE % (FORMAT, _sum(FORMAT, body)) + body + _AFTER)
    except OSError as error:
        what = f"cannot write {folder / NAME}: {error.strerror}"
        raise CheckpointError(what, hint=os_error_hint(error, WRITE_HINT)) from None


def read(folder: Location) -> Manifest:
    """Read the manifest in a checkpoint's folder.

    Raises: DamagedError if it is missing or damaged, CheckpointError if unreadable or of another format
    """
    return parse(folder, read_text(folder))


def read_text(folder: Location) -> bytes:
    """Read the text of a manifest. Raises: DamagedError if it is missing, CheckpointError if unreadable"""
    try:
        return (folder / NAME).read()
    except OSError as error:
        raise read_error(folder / NAME, error) from None


def read_error(path: Location, error: OSError) -> CheckpointError:
    """Return the error to raise for an unreadable file: a DamagedError if the cause is damage."""
    what = f"{path} cannot be read: {error.strerror}"
    if path.is_damage(error):
        return DamagedError(what)
    return CheckpointError(what, hint=os_error_hint(error, "permissions, the network"))


def parse(folder: Location, text: bytes) -> Manifest:
    """Parse the text of the manifest in `folder`.

    Raises: DamagedError if the text is damaged, CheckpointError for another format
    """
    path = folder / NAME
    head = _BEGINS.match(text)
    if head is None:
        try:
            first_format = isinstance(found := json.loads(text), dict) and found.get("format") == 1
        except ValueError:
            first_format = False
        if first_format:  # it had no such line
            raise CheckpointError(f"{path} has format 1, this version reads {FORMAT}", hint=VERSION_HINT)
        raise DamagedError(f"{path} is damaged: it is no manifest")
    version, body = int(head.group(1)), text[head.end() :].removesuffix(_AFTER)
    if int(head.group(2)) != _sum(version, body) or text != _BEFORE % (version, int(head.group(2))) + body + _AFTER:
        raise DamagedError(f"{path} is damaged: its CRC-32 does not match its text")
    if version != FORMAT:
        raise CheckpointError(f"{path} has format {version}, this version reads {FORMAT}", hint=VERSION_HINT)
    try:
        return Manifest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedError(f"{path} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _sum(version: int, body: bytes) -> int:
    return zlib.crc32(b"%d\n%b" % (version, body))
