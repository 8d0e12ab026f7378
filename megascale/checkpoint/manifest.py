"""The manifest of a checkpoint: JSON that says what was saved, of which run, and where each box of each tensor lies.

It is renamed into place last, so that a folder that has one is complete. Beside what it says it holds the CRC-32 of
that text.
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
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import megascale
from megascale.checkpoint.state import Progress
from megascale.checkpoint.storage import WRITABLE, Location
from megascale.core.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 2
_BEFORE = b'{"format": %d, "crc32": %d, "manifest":\n'
_BEGINS = re.compile(rb'\{"format": (\d+), "crc32": (\d+), "manifest":\n')
_AFTER = b"}\n"
OTHER = "use the version that wrote it"


class DamagedError(CheckpointError):
    """A checkpoint that is not what was written."""

    def __init__(self, what: str, *, mend: str = "megascale ckpt verify says whether that is all") -> None:
        super().__init__(what, mend=mend)


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True)


Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]
"""Of a file in the checkpoint's own folder."""


class Box(_Entry):
    """A box of a tensor: its place in the whole, and where its numbers begin in a file. `sums`: the CRC-32 of every
    `Manifest.chunk` bytes of them, of which the last may be fewer.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: Name
    start: int
    sums: tuple[int, ...]


class File(_Entry):
    """Size and CRC-32 of a whole file."""

    bytes: int
    crc32: int


class Tensor(_Entry):
    """A tensor by its global name: shape, type as torch names it, and the boxes that fill it."""

    shape: tuple[int, ...]
    dtype: Literal["float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8"]
    boxes: tuple[Box, ...]

    @model_validator(mode="after")
    def _holds_its_boxes(self) -> Tensor:
        for box in self.boxes:
            sides = zip(box.offset, box.size, self.shape, strict=False)
            if not len(box.offset) == len(box.size) == len(self.shape) or box.start < 0:
                raise ValueError(f"a box of {len(box.size)} sides at byte {box.start} of shape {list(self.shape)}")
            if any(offset < 0 or size < 0 or offset + size > whole for offset, size, whole in sides):
                raise ValueError(f"a box beyond shape {list(self.shape)}: {list(box.size)} at {list(box.offset)}")
        return self

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, boxes: tuple[Box, ...]) -> Tensor:
        """From torch's type."""
        name: Any = str(dtype).removeprefix("torch.")
        return cls(shape=tuple(shape), dtype=name, boxes=boxes)


class Facts(_Entry):
    """What a checkpoint knows of its run. `config` and `layout`: as resolved."""

    progress: Progress
    config: dict[str, Any]
    layout: dict[str, int]
    versions: dict[str, str]
    host: str

    @classmethod
    def of(cls, progress: Progress, config: dict[str, Any], layout: dict[str, int]) -> Facts:
        """Of a run of this version on this host."""
        found = {"megascale": megascale.__version__, "torch": torch.__version__, "python": platform.python_version()}
        return cls(progress=replace(progress), config=config, layout=layout, versions=found, host=socket.gethostname())


class Manifest(_Entry):
    """The whole manifest. `chunk` [bytes]: what one checksum of a box is of."""

    facts: Facts
    chunk: Annotated[int, Field(gt=0)]
    files: dict[Name, File]
    tensors: dict[str, Tensor]


def write(folder: Location, manifest: Manifest) -> None:
    """Complete a checkpoint.

    Raises: CheckpointError if it cannot be written.
    """
    body = manifest.model_dump_json().encode()
    try:
        (folder / NAME).write(_BEFORE % (FORMAT, _sum(FORMAT, body)) + body + _AFTER)
    except OSError as error:
        what = f"cannot write {folder / NAME}: {error.strerror}"
        raise CheckpointError(what, mend=WRITABLE) from None


def read(folder: Location) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises: DamagedError if it is missing or damaged, CheckpointError if it cannot be read or is of another format.
    """
    return parse(folder, text_of(folder))


def text_of(folder: Location) -> bytes:
    """The text of a checkpoint's manifest.

    Raises: DamagedError if it is not there, CheckpointError if it cannot be read.
    """
    try:
        return (folder / NAME).read()
    except OSError as error:
        raise unreadable(folder / NAME, error) from None


def unreadable(path: Location, error: OSError) -> CheckpointError:
    """What to say of a file of a checkpoint that cannot be read: a DamagedError if that says that it is damaged."""
    what = f"{path} cannot be read: {error.strerror}"
    if path.gone(error):
        return DamagedError(what)
    return CheckpointError(what, mend="who may read it, the network; nothing was lost")


def parse(folder: Location, text: bytes) -> Manifest:
    """The manifest of a checkpoint's folder from its text.

    Raises: DamagedError if it is damaged, CheckpointError if it is of another format.
    """
    path = folder / NAME
    head = _BEGINS.match(text)
    if head is None:
        raise _of_no_form(path, text)
    found, body = int(head.group(1)), text[head.end() :].removesuffix(_AFTER)
    if int(head.group(2)) != _sum(found, body) or text != _BEFORE % (found, int(head.group(2))) + body + _AFTER:
        raise DamagedError(f"{path} is damaged: its CRC-32 is not that of its text")
    if found != FORMAT:
        raise CheckpointError(f"{path} has format {found}, this version reads {FORMAT}", mend=OTHER)
    try:
        return Manifest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedError(f"{path} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _sum(found: int, body: bytes) -> int:
    """The CRC-32 of a manifest's text, its format first."""
    return zlib.crc32(b"%d\n%b" % (found, body))


def _of_no_form(path: Location, text: bytes) -> CheckpointError:
    """What to say of a file that does not begin as ours do: format 1 did not."""
    try:
        found = json.loads(text)["format"]
    except (ValueError, LookupError, TypeError):
        found = None
    if found == 1:
        return CheckpointError(f"{path} has format 1, this version reads {FORMAT}", mend=OTHER)
    return DamagedError(f"{path} is damaged: it is not what was written")
