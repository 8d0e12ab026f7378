"""megatron-core's indexed dataset format, written and read with numpy alone.

    PREFIX.bin   the tokens of all documents, concatenated
    PREFIX.idx   little-endian: 9 bytes of magic, u64 version 1, u8 code of the token dtype, u64 number of sequences n,
                 u64 n + 1, i32[n] lengths in tokens, i64[n] offsets in bytes, i64[n + 1] document bounds (0 to n here:
                 a document is a sequence)
    PREFIX.json  ours: the sizes, and the tokenizer that made the dataset

write_dataset: write a dataset. open_dataset, map_dataset: memory-map one, and check all of its index, or nothing.
IndexedDataset: its documents. DatasetInfo: PREFIX.json.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np

from megascale.config.dataset_files import MAGIC, PREPARE_AGAIN_HINT, DatasetFiles, read_dataset_files
from megascale.core.errors import DataError
from megascale.core.files import atomic_file
from megascale.core.limits import os_error_hint
from megascale.core.process import process_exists

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
    """The content of PREFIX.json."""

    vocab_size: int
    tokens: int
    documents: int
    tokenizer: TokenizerInfo


def token_dtype(vocab_size: int) -> type[np.generic]:
    """The dtype that megatron-core chooses for a vocabulary: u16 below 65,500 tokens, else i32."""
    return np.uint16 if vocab_size < 65_500 else np.int32


def write_dataset(prefix: Path, documents: Iterable[np.ndarray], origin: TokenizerInfo, vocab_size: int) -> DatasetInfo:
    """Write a dataset of `documents` (arrays of token ids, eod included).

    The files appear under their names once all data is on disk. An older dataset of the same prefix is replaced then,
    and its files are never mixed with the new ones.

    Raises: DataError if there is no document, a document cannot be stored, or the files cannot be written.
    """
    dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
    bin_path, idx_path, json_path = (_file(prefix, ending) for ending in (".bin", ".idx", ".json"))
    try:
        _remove_leftovers(prefix)
        # files are renamed in reverse order of opening: the description of a complete dataset comes last
        with (
            atomic_file(json_path, "w") as json_file,
            atomic_file(idx_path) as idx_file,
            atomic_file(bin_path) as bin_file,
        ):
            lengths = _write_tokens(bin_file, documents, dtype, vocab_size)
            description = DatasetInfo(vocab_size, int(lengths.sum(dtype=np.int64)), len(lengths), origin)
            idx_file.write(_index(lengths, dtype))
            json_file.write(json.dumps(asdict(description), indent=1) + "\n")
            for file in (bin_file, idx_file, json_file):
                file.flush()  # a full disk shows here, while the old dataset is still complete
            idx_path.unlink(missing_ok=True)
            json_path.unlink(missing_ok=True)
    except OSError as error:
        hint = os_error_hint(error, "another --output")
        raise DataError(f"{prefix} cannot be written: {error.strerror or error}", hint=hint) from None
    return description


def _write_tokens(file: IO, documents: Iterable[np.ndarray], dtype: np.dtype, vocab_size: int) -> np.ndarray:
    """Write the tokens and return the document lengths, i32 [n]."""
    lengths = array("i")
    for number, ids in enumerate(documents):
        try:
            lengths.append(len(ids))
        except OverflowError:
            raise DataError(f"document {number} has {len(ids):,} tokens; 2,147,483,647 fit", hint="split it") from None
        if len(ids) and int(ids.max()) >= vocab_size:
            what = f"document {number} has token {ids.max()}, but the vocabulary has {vocab_size}"
            raise DataError(what, hint="fix the tokenizer")
        file.write(ids.astype(dtype, copy=False).tobytes())
    if not lengths:
        raise DataError("the input has no text", hint="check the files and --key")
    return np.frombuffer(lengths, dtype=np.intc)


def _index(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    n = len(lengths)
    code = next(code for code, known in DTYPE_CODES.items() if np.dtype(known) == dtype.newbyteorder("="))
    # numpy strips trailing zeros when it reads 'S9', but writes all nine bytes
    header = np.array([(MAGIC, 1, code, n, n + 1)], dtype=HEADER)
    offsets = np.zeros(n, dtype="<i8")
    np.cumsum(lengths[:-1].astype("<i8") * dtype.itemsize, out=offsets[1:])
    bounds = np.arange(n + 1, dtype="<i8")
    return b"".join(part.tobytes() for part in (header, lengths.astype("<i4"), offsets, bounds))


def _remove_leftovers(prefix: Path) -> None:
    """Remove the temporary files that a killed writer of this prefix left: files whose process has ended."""
    for ending in (".bin", ".idx", ".json"):
        for path in prefix.parent.glob(f".{prefix.name}{ending}.*.tmp"):
            owner = path.name.removesuffix(".tmp").rpartition(".")[2]
            if owner.isdigit() and not process_exists(int(owner)):
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class IndexedDataset:
    """A memory-mapped dataset. `lengths` [n], in tokens, and `offsets` [n], in bytes, of its documents; `ends` [n + 1],
    the bounds of documents in sequences. `info` is None for a dataset of another tool.
    """

    prefix: str
    tokens: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    ends: np.ndarray
    info: DatasetInfo | None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """The token ids of a document."""
        return self.read(index, 0, int(self.lengths[index]))

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """The token ids [start, stop) of a document.

        Raises: IndexError for tokens that are not there
        """
        length, first = int(self.lengths[document]), int(self.offsets[document]) // self.tokens.itemsize
        part = self.tokens[first + start : first + stop]
        if not 0 <= start <= stop <= length or first < 0 or len(part) != stop - start:
            raise IndexError(f"tokens {start} to {stop} of document {document}, which has {length} at {first}")
        return part

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


def open_dataset(prefix: str | Path) -> IndexedDataset:
    """Open a dataset, and check all of its index.

    Raises: DataError for files that are missing, damaged, cut short, or of different datasets.
    """
    dataset = map_dataset(prefix, read_dataset_files(str(prefix)))
    if len(dataset.ends) and int(dataset.ends.min()) < 0:
        what = f"{prefix}.idx is damaged: its documents do not end where its sequences do"
        raise DataError(what, hint=PREPARE_AGAIN_HINT)
    dataset.check_places(0, len(dataset), len(dataset.tokens))
    return dataset


def map_dataset(prefix: str | Path, files: DatasetFiles) -> IndexedDataset:
    """Memory-map a dataset, of which `files` are checked, without reading its index.

    Raises: DataError for files that cannot be read.
    """
    try:
        n, entries = files.documents, np.asarray(np.memmap(f"{prefix}.idx", mode="r"))[HEADER.itemsize :]
        lengths, offsets, ends = np.split(entries[: 12 * n + 8 * files.bounds], [4 * n, 12 * n])
        dtype = np.dtype(DTYPE_CODES[files.dtype_code]).newbyteorder("<")
        tokens = np.asarray(np.memmap(f"{prefix}.bin", dtype, mode="r")) if files.tokens else np.empty(0, dtype)
    except OSError as error:
        hint = os_error_hint(error, "the files of a dataset must stay in place while a run reads them")
        raise DataError(f"{prefix} cannot be read: {error.strerror or error}", hint=hint) from None
    numbers = (lengths.view("<i4"), offsets.view("<i8"), ends.view("<i8"))
    return IndexedDataset(str(prefix), tokens, *numbers, read_info(Path(prefix)))


def read_info(prefix: Path) -> DatasetInfo | None:
    """Read PREFIX.json; None for a dataset of another tool, which has no such file.

    Raises: DataError for a file that is unreadable or of another content
    """
    path = _file(prefix, ".json")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return DatasetInfo(**{**facts, "tokenizer": TokenizerInfo(**facts["tokenizer"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} cannot be read: {error!r}", hint=PREPARE_AGAIN_HINT) from None


def _file(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)
