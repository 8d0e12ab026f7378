"""Folders of torch.distributed.checkpoint (DCP), read without running code of theirs, and written.

`.metadata` is a pickle: chunks of tensors by name, and for each chunk or object the bytes of a `.distcp` file that
torch.save has written of it.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from megascale.checkpoint.format.state import Region, missing_region, slices
from megascale.core.errors import CheckpointError
from megascale.core.files import is_file, why_unreadable
from megascale.parallel.stateful import GlobalTensor

METADATA = ".metadata"
SHARD_FILE = "__0_0.distcp"  # as the first rank names it

DAMAGED_HINT = "copy the folder anew, or take an earlier checkpoint"
CODE_HINT = "a pickle can run code: only tensors, numbers, texts and containers of them are read"

INERT = re.compile(r"(torch\.distributed\.(checkpoint|_shard)|megatron\.core\.dist_checkpointing|pathlib)\b")
"""Modules whose classes `.metadata` may name: a `Record` stands for each."""


class Record:
    """An object of a class of DCP, without the class: its pickled state as attributes, or `args` and `state`."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Unpickler(pickle.Unpickler):
    """Makes records, sizes and dtypes alone. Raises: CheckpointError with the name of any other class"""

    def find_class(self, module: str, name: str) -> Any:
        if INERT.match(module) or (module, name) == ("torch.serialization", "_get_layout"):
            return Record
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise CheckpointError(f"{METADATA} names {module}.{name}, which is not opened", hint=CODE_HINT)


class ByteSpan(NamedTuple):
    """Bytes of a file of a folder."""

    file: str
    start: int
    length: int


@dataclass(frozen=True)
class DcpTensor:
    """Shape and dtype of a tensor, and the regions that are stored, each with its bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Mapping[Region, ByteSpan]


class DcpFolder:
    """A folder of torch.distributed.checkpoint. `tensors`, and spans of other `objects`, by name; `metadata`: the whole
    record, which may have attributes of the system that wrote it.

    Raises: CheckpointError if a file is missing, too short, or names a class of no checkpoint
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = _read_metadata(folder / METADATA)
        self.tensors: dict[str, DcpTensor] = {}
        self.objects: dict[str, ByteSpan] = {}
        try:
            places = {}
            for key, info in self.metadata.storage_data.items():
                if descriptors := vars(info).get("transform_descriptors"):
                    what = f"{self.folder}: {key.fqn} is stored transformed, by {', '.join(descriptors)}"
                    raise CheckpointError(what, hint="save it without extensions of the storage writer")
                places[key.fqn, vars(key).get("offset")] = ByteSpan(info.relative_path, info.offset, info.length)
            for name, item in self.metadata.state_dict_metadata.items():
                if "chunks" in vars(item):
                    chunks = {(chunk.offsets, chunk.sizes): places[name, chunk.offsets] for chunk in item.chunks}
                    if any(len(side) != len(item.size) for region in chunks for side in region):
                        raise ValueError(f"a chunk of {name} has other dimensions")
                    self.tensors[name] = DcpTensor(item.size, item.properties.state[0], chunks)
                else:
                    self.objects[name] = places[name, None]
            spans = [span for tensor in self.tensors.values() for span in tensor.chunks.values()]
            self._check_files([*spans, *self.objects.values()])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = f"{folder / METADATA} is not what torch.distributed.checkpoint writes: {error!r}"
            raise CheckpointError(what, hint=DAMAGED_HINT) from None

    def _check_files(self, spans: Iterable[ByteSpan]) -> None:
        """Check that each file is there, and has all its spans. Raises: CheckpointError"""
        ends: dict[str, int] = {}
        for file, start, length in spans:
            ends[file] = max(ends.get(file, 0), start + length)
        for file, end in ends.items():
            path = self.folder / file
            if Path(file).name != file or not is_file(path):
                raise CheckpointError(f"{self.folder} lacks the file {file}", hint=DAMAGED_HINT)
            if (size := path.stat().st_size) < end:
                what = f"{path} has {size} bytes, {METADATA} tells of {end}"
                raise CheckpointError(what, hint=DAMAGED_HINT)

    def read(self, name: str, part: Region | None = None) -> Tensor:
        """Read a tensor, or its region `part` (offset, size). One chunk at a time is in memory beside it.

        Raises: CheckpointError if the tensor, or an element of it, is missing, or a chunk is damaged
        """
        if (tensor := self.tensors.get(name)) is None:
            raise CheckpointError(f"{self.folder} has no tensor {name}", hint="a checkpoint of this model")
        offset, size = part or ((0,) * len(tensor.shape), tensor.shape)
        if missing := missing_region((offset, size), tensor.chunks):
            lacks = ", ".join(f"{first}:{first + count}" for first, count in zip(*missing, strict=True))
            what = f"{self.folder} holds only a part of {name} {list(tensor.shape)}: it lacks [{lacks}]"
            raise CheckpointError(what, hint=DAMAGED_HINT)
        filled = torch.empty(size, dtype=tensor.dtype)
        for (low, count), span in tensor.chunks.items():
            first = [max(a, b) for a, b in zip(low, offset, strict=True)]
            stop = [min(a + n, b + m) for a, n, b, m in zip(low, count, offset, size, strict=True)]
            shared = [b - a for a, b in zip(first, stop, strict=True)]
            if all(extent > 0 for extent in shared):
                chunk = self._load(name, span)
                if not isinstance(chunk, Tensor) or (tuple(chunk.shape), chunk.dtype) != (count, tensor.dtype):
                    what = f"{self.folder / span.file}: {name} is not what {METADATA} says"
                    raise CheckpointError(what, hint=DAMAGED_HINT)
                within, to = ([a - b for a, b in zip(first, base, strict=True)] for base in (low, offset))
                filled[slices(to, shared)] = chunk[slices(within, shared)]
        return filled

    def read_value(self, name: str) -> Any:
        """Read an object that is no tensor: numbers, texts, bytes and containers of them.

        Raises: CheckpointError if it is missing or damaged, or if it has objects of other classes
        """
        if name not in self.objects:
            raise CheckpointError(f"{self.folder} has no object {name}", hint="a checkpoint of this model")
        return self._load(name, self.objects[name])

    def _load(self, name: str, span: ByteSpan) -> Any:
        path = self.folder / span.file
        with open(path, "rb") as file:
            file.seek(span.start)
            data = io.BytesIO(file.read(span.length))
        return load_plain(data, f"{path}: {name}")


def load_plain(file: Path | io.BytesIO, where: str, inert: re.Pattern[str] | None = None) -> Any:
    """Read what torch.save has written, with tensors mapped from a path, and without running code: a `Record` stands
    for each class and function of `inert`.

    Raises: CheckpointError on `where` if it is damaged, or names others
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        refused = sorted(name for name in names if not (inert and inert.fullmatch(name)))
        if not refused:
            with torch.serialization.safe_globals([(Record, name) for name in names]):
                if isinstance(file, io.BytesIO):
                    file.seek(0)
                return torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, Path))
    except Exception as error:  # of many classes, as the bytes may be any
        raise CheckpointError(f"{where} is damaged: {str(error).partition(chr(10))[0]}", hint=DAMAGED_HINT) from None
    raise CheckpointError(f"{where} names {', '.join(refused)}, which is not opened", hint=CODE_HINT)


def _read_metadata(path: Path) -> Any:
    """Read the pickle of a folder. Raises: CheckpointError"""
    if reason := why_unreadable(path):
        hint = "a folder that torch.distributed.checkpoint has written, such as checkpoint/step-1000"
        raise CheckpointError(reason, hint=hint)
    try:
        with open(path, "rb") as file:
            return _Unpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path.parent}: {error.message}", hint=error.hint) from None
    except Exception as error:  # the bytes may be any
        raise CheckpointError(f"{path} is damaged: {error!r}", hint=DAMAGED_HINT) from None


def _append(file: IO[bytes], item: Any) -> Any:
    """Append an item to a file, and return where it is."""
    from torch.distributed.checkpoint import filesystem

    if isinstance(item, Tensor) and not (item.is_contiguous() and item.untyped_storage().nbytes() == item.nbytes):
        item = item.clone(memory_format=torch.contiguous_format)  # of a view the whole storage would be written
    data, start = io.BytesIO(), file.tell()
    torch.save(item, data)
    file.write(data.getbuffer())
    return filesystem._StorageInfo(SHARD_FILE, start, file.tell() - start)


def write_dcp(folder: Path, items: Iterable[tuple[str, Any]], dicts: Collection[str] = ()) -> None:
    """Write tensors and other objects by name into an existing folder, for torch.distributed.checkpoint.load. Of a
    `GlobalTensor` each item may have other shards. One item at a time is in memory. `dicts`: of the state dict, which
    have the items named DICT.NAME.

    Raises: OSError
    """
    from torch.distributed.checkpoint import filesystem, metadata

    described: dict[str, Any] = {}
    stored = {}
    with open(folder / SHARD_FILE, "wb") as file:
        for name, item in items:
            if not isinstance(item, Tensor | GlobalTensor):
                described[name] = metadata.BytesStorageMetadata()
                stored[metadata.MetadataIndex(name)] = _append(file, item)
                continue
            tensor = GlobalTensor.whole(item) if isinstance(item, Tensor) else item
            properties = metadata.TensorProperties(dtype=tensor.dtype)
            empty = metadata.TensorStorageMetadata(properties, torch.Size(tensor.shape), [])
            listed = described.setdefault(name, empty)
            for shard in tensor.shards:
                offset, size = torch.Size(shard.offset), torch.Size(shard.size)
                listed.chunks.append(metadata.ChunkStorageMetadata(offset, size))
                stored[metadata.MetadataIndex(name, offset)] = _append(file, shard.data.view(size))
    paths = {name: tuple(name.split(".", 1 if name.partition(".")[0] in dicts else 0)) for name in described}
    with open(folder / METADATA, "wb") as file:
        pickle.dump(metadata.Metadata(described, paths, stored, version=filesystem.CURRENT_DCP_VERSION), file)
