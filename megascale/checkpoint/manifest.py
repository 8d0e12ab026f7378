"""The manifest of a checkpoint: JSON that says what was saved, of which run, and where each box of each tensor lies.

It is renamed into place last, so that a folder that has one is complete.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import megascale
from megascale.checkpoint.state import Progress
from megascale.core.errors import CheckpointError
from megascale.core.files import write_text

NAME = "manifest.json"
BYPASS = "remove that folder: the run then goes on from the checkpoint before it"
FORMAT: Literal[1] = 1


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True)


class Box(_Entry):
    """A box of a tensor: its place in the whole, and the entry `key` of a safetensors `file` that holds its numbers,
    with their CRC-32.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: Annotated[str, Field(pattern=r"^[\w.-]+$")]  # in the checkpoint's own folder
    key: str
    crc32: int


class Tensor(_Entry):
    """A tensor by its global name: shape, type as torch names it, and the boxes that fill it."""

    shape: tuple[int, ...]
    dtype: Literal["float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8"]
    boxes: tuple[Box, ...]

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
    """The whole manifest."""

    format: Literal[1] = FORMAT
    facts: Facts
    tensors: dict[str, Tensor]


def write(folder: Path, manifest: Manifest) -> None:
    """Complete a checkpoint.

    Raises: CheckpointError if it cannot be written.
    """
    try:
        write_text(folder / NAME, manifest.model_dump_json(indent=1))
    except OSError as error:
        what = f"cannot write {folder / NAME}: {error.strerror}"
        raise CheckpointError(what, mend="check space and permissions") from None


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises: CheckpointError if it is missing, damaged, or of another format.
    """
    path = folder / NAME
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", mend=BYPASS) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{path} is damaged: {where or 'the file'}: {first['msg']}"
        if where == "format":
            what = f"{path} has format {first['input']!r}, this version reads {FORMAT}"
        raise CheckpointError(what, mend=f"{BYPASS}; or use the version that wrote it") from None
