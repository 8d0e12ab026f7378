"""megatron-core's indexed dataset format, read with numpy alone; `dataset_writer` writes it.

    PREFIX.bin   the tokens of all documents, concatenated
    PREFIX.idx   little-endian: 9 bytes of magic, u64 version 1, u8 code of the token dtype, u64 number of sequences n,
                 u64 n + 1, i32[n] lengths in tokens, i64[n] offsets in bytes, i64[n + 1] document bounds (0 to n here:
                 a document is a sequence)
    PREFIX.json  ours: the sizes, and the tokenizer that made the dataset

open_dataset, map_dataset: memory-map a dataset, and check all of its index, or nothing. IndexedDataset: its documents.
DatasetInfo: PREFIX.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megascale.config.dataset_files import PREPARE_AGAIN_HINT, DatasetFiles, read_dataset_files, read_description
from megascale.core.errors import DataError
from megascale.core.limits import os_error_hint
from megascale.core.readable import is_url

if TYPE_CHECKING:
    from megascale.data.read.block_cache import Block, BlockCache, RemoteTokens

HEADER = np.dtype([("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("bounds", "<u8")])
DTYPE_CODES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer of a dataset: name or file, fingerprint, end-of-document id, the file that named the id, and the id
    that begins each document, or None.
    """

    name: str
    fingerprint: str
    eod: int
    eod_origin: str = ""
    bos: int | None = None


@dataclass(frozen=True)
class DatasetInfo:
    """The content of PREFIX.json. `vocab_size`: of the tokenizer. `highest_token`: of those in the dataset; -1 if
    unknown.
    """

    vocab_size: int
    tokens: int
    documents: int
    tokenizer: TokenizerInfo
    highest_token: int = -1


@dataclass(frozen=True)
class IndexedDataset:
    """A memory-mapped dataset. `lengths` [n], in tokens, and `offsets` [n], in bytes, of its documents; `ends` [n + 1],
    the bounds of documents in sequences. `info` is None for a dataset of another tool.
    """

    prefix: str
    tokens: np.ndarray | RemoteTokens
    lengths: np.ndarray
    offsets: np.ndarray
    ends: np.ndarray
    info: DatasetInfo | None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.read(index, 0, int(self.lengths[index]))

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """The token ids [start, stop) of a document. Raises: IndexError for tokens that are not there"""
        length, first = int(self.lengths[document]), int(self.offsets[document]) // self.tokens.itemsize
        part = self.tokens[first + start : first + stop]
        if not 0 <= start <= stop <= length or first < 0 or len(part) != stop - start:
            raise IndexError(f"tokens {start} to {stop} of document {document}, which has {length} at {first}")
        return part

    def missing(self, pieces: Iterable[tuple[int, int, int]]) -> list[Block]:
        """Return the blocks of pieces (document, start, stop) that are not in the cache; none of a local dataset."""
        if isinstance(self.tokens, np.ndarray):
            return []
        item = self.tokens.itemsize
        places = ((int(self.offsets[document]) // item, start, stop) for document, start, stop in pieces)
        return self.tokens.missing((first + start, first + stop) for first, start, stop in places)

    def check_places(self, first: int, last: int, tokens: int) -> None:
        """Check the places of documents [first, last), which have `tokens` tokens, against the size of the tokens.

        Raises: DataError
        """
        size, item = len(self.tokens) * self.tokens.itemsize, self.tokens.itemsize
        lengths, offsets = self.lengths[first:last], self.offsets[first:last]
        found = int(lengths.sum(dtype=np.int64))
        if found != tokens:
            what = f"{self.prefix}.idx is damaged: documents {first} to {last} have {found} tokens in {tokens} places"
            raise DataError(what, hint=PREPARE_AGAIN_HINT)
        outside = (lengths < 0) | (offsets < 0) | (offsets > size - lengths.astype(np.int64) * item)
        if outside.any():
            number = int(outside.argmax())
            place = f"{lengths[number]} tokens at byte {offsets[number]}"
            what = f"{self.prefix}.idx is damaged: document {first + number} has {place} of {size}"
            raise DataError(what, hint=PREPARE_AGAIN_HINT)


def open_dataset(prefix: str | Path, cache: BlockCache | None = None) -> IndexedDataset:
    """Open a dataset, and check all of its index. `cache`: of a remote dataset.

    Raises: DataError for files that are missing, damaged, cut short, or of different datasets.
    """
    dataset = map_dataset(prefix, read_dataset_files(str(prefix)), cache)
    if len(dataset.ends) and int(dataset.ends.min()) < 0:
        what = f"{prefix}.idx is damaged: its documents do not end where its sequences do"
        raise DataError(what, hint=PREPARE_AGAIN_HINT)
    dataset.check_places(0, len(dataset), len(dataset.tokens))
    return dataset


def map_dataset(prefix: str | Path, files: DatasetFiles, cache: BlockCache | None = None) -> IndexedDataset:
    """Memory-map a dataset, of which `files` are checked, without reading its index. `cache`: of a remote dataset,
    whose index is downloaded, and whose tokens are read by blocks.

    Raises: DataError for files that cannot be read.
    """
    try:
        index: str | Path = f"{prefix}.idx"
        if is_url(files.prefix):
            assert cache is not None, "a remote dataset needs a cache"
            index = cache.whole_file(f"{prefix}.idx", files.index_bytes, files.versions[0])
        n, entries = files.documents, np.asarray(np.memmap(index, mode="r"))[HEADER.itemsize :]
        lengths, offsets, ends = np.split(entries[: 12 * n + 8 * files.bounds], [4 * n, 12 * n])
        dtype = np.dtype(DTYPE_CODES[files.dtype_code]).newbyteorder("<")
        name = f"{files.prefix}.bin"
        tokens: np.ndarray | RemoteTokens = np.empty(0, dtype)
        if files.tokens and cache is not None and is_url(name):
            from megascale.data.read.block_cache import RemoteTokens

            tokens = RemoteTokens(cache.open(name, files.tokens * dtype.itemsize, files.versions[1]), dtype)
        elif files.tokens:
            tokens = np.asarray(np.memmap(name, dtype, mode="r"))
    except OSError as error:
        hint = os_error_hint(error, "the files of a dataset must stay in place while a run reads them")
        raise DataError(f"{prefix} cannot be read: {error.strerror or error}", hint=hint) from None
    numbers = (lengths.view("<i4"), offsets.view("<i8"), ends.view("<i8"))
    return IndexedDataset(str(prefix), tokens, *numbers, _info_of(prefix, files.description))


def read_info(prefix: str | Path) -> DatasetInfo | None:
    """Read PREFIX.json; None for a dataset of another tool, which has no such file.

    Raises: DataError for a file that is unreadable or of another content
    """
    return _info_of(prefix, read_description(f"{prefix}.json"))


def _info_of(prefix: str | Path, description: Mapping[str, Any]) -> DatasetInfo | None:
    if not description:
        return None
    try:
        return DatasetInfo(**{**description, "tokenizer": TokenizerInfo(**description["tokenizer"])})
    except TypeError as error:
        raise DataError(f"{prefix}.json cannot be read: {error!r}", hint=PREPARE_AGAIN_HINT) from None
