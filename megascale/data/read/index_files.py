"""Epoch indices as files, built by one process and memory-mapped by all that share the folder.

A file is a header, which says what the index is of, the three arrays, and a checksum. Reading a file parses nothing:
the header must equal, byte for byte, the one that this run would write, and the size must be that of the arrays. The
checksum is compared by one process after each change of the file, and by `megascale data index`. The order of
samples is a function of the dataset, the seed and the epoch, so that a process that finds no file builds the same one.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megascale.config.dataset_files import read_dataset_files
from megascale.core.errors import DataError
from megascale.core.files import build_once, remove_leftovers
from megascale.core.limits import os_error_hint, with_os_error_hint
from megascale.core.readable import is_url
from megascale.core.units import format_bytes
from megascale.data.read.checksum import CHECKSUM_BYTES, check_file, file_with_checksum, once_a_version
from megascale.data.read.epoch_index import EpochIndex, IndexShape, sample_starts
from megascale.data.read.indexed_dataset import IndexedDataset, map_dataset

FORMAT = "megascale epoch index 2"

ALIGNMENT = 64  # bytes that the header and each array are padded to a multiple of

MEMORY_ENTRIES = 1 << 16
"""Documents and samples up to which an index is built in memory, in about a millisecond, rather than kept as a file: a
small dataset may repeat thousands of times.
"""


@dataclass(frozen=True)
class IndexKey:
    """An index: `dataset` (its prefix, size and time of change; also those of `data.document_order_file`), epoch, and
    the `seed` of its shuffles.
    """

    dataset: Mapping[str, Any]
    epoch: int
    seed: int
    shape: IndexShape

    @property
    def is_small(self) -> bool:
        return self.shape.documents + self.shape.samples <= MEMORY_ENTRIES

    @property
    def header(self) -> bytes:
        facts = {"format": FORMAT, **self.dataset, "epoch": self.epoch, "seed": self.seed, **vars(self.shape)}
        text = json.dumps(facts, sort_keys=True).encode() + b"\n"
        return text.ljust(_padded(len(text)))

    @property
    def file_name(self) -> str:
        name = Path(str(self.dataset["prefix"])).name[:64]
        return f"{name}-epoch{self.epoch}-{hashlib.sha256(self.header).hexdigest()[:20]}.index"


def open_index(folder: Path, key: IndexKey, files: IndexedDataset) -> EpochIndex:
    """Memory-map the index of `key` in `folder`; build it first if no process has. Small indices are built in memory.
    `files`: of the dataset.

    Raises: DataError for a folder that cannot be written, a damaged file, and lack of memory.
    """
    if key.is_small:
        return _build(key, files)
    path = folder / key.file_name
    try:
        build_once(path, lambda: write_index(path, key, files))
    except OSError as error:
        size = format_bytes(_layout(key)[1])
        what = f"sample indices of {size} cannot be kept in {folder}: {error.strerror or error}"
        raise DataError(what, hint=with_os_error_hint(error, "data.cache = another folder")) from None
    except MemoryError as error:
        raise DataError(f"sample indices do not fit in memory: {error}", hint="more memory") from None
    return map_index(path, key)


def map_index(path: Path, key: IndexKey, *, again: bool = False) -> EpochIndex:
    """Memory-map the file of an index, and compare it with `key`, and with the checksum if nobody has, or `again`.

    Raises: DataError for a file that cannot be read, or is not the index
    """

    def check() -> None:
        check_file(path, _layout(key)[1] - CHECKSUM_BYTES)

    try:
        index = _map(path, key)
        if again:
            check()
        else:
            once_a_version(path, check)
        return index
    except OSError as error:
        hint = os_error_hint(error, "files of data.cache must stay in place while a run reads them")
        raise DataError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from None
    except ValueError as error:
        raise DataError(f"sample indices are damaged: {path} {error}", hint="remove that file") from None


def write_index(path: Path, key: IndexKey, files: IndexedDataset) -> None:
    """Build an index and write its file, atomically. What killed processes have left of it is removed.

    Raises: DataError for a damaged dataset; OSError
    """
    remove_leftovers(path)
    index = _build(key, files)
    with file_with_checksum(path) as write:
        write(key.header)
        for array in (index.documents, index.starts, index.order):
            write(array.data)
            write(bytes(_padded(array.nbytes) - array.nbytes))


def open_dataset_of(key: IndexKey, folder: Path) -> IndexedDataset:
    """Open the dataset of an index, whose own index is in `folder` if it is remote."""
    prefix, cache = str(key.dataset["prefix"]), None
    if is_url(prefix):
        from megascale.data.read.block_cache import BlockCache

        cache = BlockCache(folder, 0)
    return map_dataset(prefix, read_dataset_files(prefix), cache)


def _build(key: IndexKey, files: IndexedDataset) -> EpochIndex:
    files.check_places(key.shape.first, key.shape.last, key.shape.tokens)
    if "order" not in key.dataset:
        return key.shape.build(files.lengths, key.seed)
    from megascale.data.read.document_order import read_order

    shape, documents = key.shape, read_order(key.dataset["order"], key.shape.first, key.shape.last)
    order = np.arange(shape.samples, dtype=shape.order_dtype)  # samples as they follow
    return EpochIndex(shape, documents, sample_starts(shape, files.lengths, documents), order)


def _map(path: Path, key: IndexKey) -> EpochIndex:
    """Raises: OSError; ValueError for a file that is not the index of `key`."""
    places, size = _layout(key)
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
        raise ValueError("is not a regular file")
    with open(path, "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise ValueError(f"has {found} bytes, not {size}")
        if file.read(len(key.header)) != key.header:
            raise ValueError("is the index of something else")
        memory = np.memmap(file, mode="r")
    documents, starts, order = (
        memory[start : start + count * np.dtype(dtype).itemsize].view(dtype) for start, count, dtype in places
    )
    return EpochIndex(key.shape, documents, starts.reshape(-1, 2), order)


def _layout(key: IndexKey) -> tuple[list[tuple[int, int, type[np.generic]]], int]:
    """The (first byte, entries, dtype) of each array, and the bytes of the file."""
    shape, start, places = key.shape, len(key.header), []
    for count, dtype in (
        (shape.documents, np.int32),
        (2 * shape.samples + 2, np.int32),
        (shape.samples, shape.order_dtype),
    ):
        places.append((start, count, dtype))
        start += _padded(count * np.dtype(dtype).itemsize)
    return places, start + CHECKSUM_BYTES


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
