"""megatron-core's token dataset format, written and read with numpy alone.

PREFIX.bin holds the tokens of all documents one after the other. PREFIX.idx holds, little-endian: 9 bytes of magic, u64
version 1, u8 code of the token format, u64 number of documents n, u64 n + 1, i32[n] lengths in tokens, i64[n] offsets
in bytes, i64[n + 1] bounds of documents (here 0 to n, since a document is one sequence). PREFIX.json is ours: which
tokenizer made it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np

from megascale.core.errors import DataError
from megascale.core.files import atomic
from megascale.core.process import runs

MAGIC = b"MMIDIDX\x00\x00"
HEADER = np.dtype([("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("bounds", "<u8")])
CODES: dict[int, type[np.generic]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
AGAIN = "prepare the data again"


@dataclass(frozen=True)
class Origin:
    """The tokenizer that made a dataset: its name or file, its fingerprint, and the id that ends its documents."""

    name: str
    fingerprint: str
    eod: int


@dataclass(frozen=True)
class Description:
    """What PREFIX.json says."""

    vocab_size: int
    tokens: int
    documents: int
    tokenizer: Origin


def token_format(vocab_size: int) -> type[np.generic]:
    """The smallest of the format's types that megatron-core would choose: u16 below 65,500 tokens, else i32."""
    return np.uint16 if vocab_size < 65_500 else np.int32


def write(prefix: Path, documents: Iterable[np.ndarray], origin: Origin, vocab_size: int) -> Description:
    """Write a dataset of `documents` (arrays of ids, eod included). Its files appear when all of it is on disk; a
    dataset that had the same prefix goes then, and is never mixed with the new one.

    Raises: DataError if there is no document, if one cannot be stored, or if the files cannot be written.
    """
    kind = np.dtype(token_format(vocab_size)).newbyteorder("<")
    bin_path, idx_path, json_path = (_file(prefix, ending) for ending in (".bin", ".idx", ".json"))
    try:
        _remove_leftovers(prefix)
        # what is opened last is renamed first: the description of a whole dataset comes last
        with atomic(json_path, "w") as json_file, atomic(idx_path) as idx_file, atomic(bin_path) as bin_file:
            lengths = _write_tokens(bin_file, documents, kind, vocab_size)
            description = Description(vocab_size, int(lengths.sum(dtype=np.int64)), len(lengths), origin)
            idx_file.write(_index(lengths, kind))
            json_file.write(json.dumps(asdict(description), indent=1) + "\n")
            for file in (bin_file, idx_file, json_file):
                file.flush()  # a full disk shows here, while the old dataset is still whole
            idx_path.unlink(missing_ok=True)
            json_path.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"{prefix} cannot be written: {error.strerror or error}", mend="another --output, or room on it"
        ) from None
    return description


def _write_tokens(file: IO, documents: Iterable[np.ndarray], kind: np.dtype, vocab_size: int) -> np.ndarray:
    """Write the tokens and return the documents' lengths, i32 [n]."""
    lengths = array("i")
    for number, ids in enumerate(documents):
        try:
            lengths.append(len(ids))
        except OverflowError:
            raise DataError(f"document {number} has {len(ids):,} tokens; 2,147,483,647 fit", mend="split it") from None
        if len(ids) and int(ids.max()) >= vocab_size:
            raise DataError(
                f"document {number} has token {ids.max()}, but the vocabulary has {vocab_size}",
                mend="mend the tokenizer",
            )
        file.write(ids.astype(kind, copy=False).tobytes())
    if not lengths:
        raise DataError("the input has no text", mend="every document was empty: check the files and --key")
    return np.frombuffer(lengths, dtype=np.intc)


def _index(lengths: np.ndarray, kind: np.dtype) -> bytes:
    n = len(lengths)
    code = next(code for code, known in CODES.items() if np.dtype(known) == kind.newbyteorder("="))
    # numpy strips trailing zeros when it reads 'S9', but writes all nine bytes
    header = np.array([(MAGIC, 1, code, n, n + 1)], dtype=HEADER)
    offsets = np.zeros(n, dtype="<i8")
    np.cumsum(lengths[:-1].astype("<i8") * kind.itemsize, out=offsets[1:])
    bounds = np.arange(n + 1, dtype="<i8")
    return b"".join(part.tobytes() for part in (header, lengths.astype("<i4"), offsets, bounds))


def _remove_leftovers(prefix: Path) -> None:
    """Remove the temporary files of a writer of this prefix that was killed: its process is no more."""
    for ending in (".bin", ".idx", ".json"):
        for path in prefix.parent.glob(f".{prefix.name}{ending}.*.tmp"):
            owner = path.name.removesuffix(".tmp").rpartition(".")[2]
            if owner.isdigit() and not runs(int(owner)):
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Reader:
    """A dataset, memory-mapped. `lengths` [n] in tokens and `offsets` [n] in bytes, of each document. `made` is None
    where another tool wrote it.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    made: Description | None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """The ids of a document."""
        start = int(self.offsets[index]) // self.tokens.itemsize
        return self.tokens[start : start + int(self.lengths[index])]


def read(prefix: Path) -> Reader:
    """Open a dataset and check that its files belong together.

    Raises: DataError for files that are missing, damaged, cut short, or of another dataset.
    """
    idx_path, bin_path = _file(prefix, ".idx"), _file(prefix, ".bin")
    for path in (idx_path, bin_path):
        if not path.is_file():
            mend = "a prefix is the path without .bin" if prefix.is_file() else "`megascale data prepare` makes it"
            raise DataError(f"there is no file {path}", mend=mend)
    try:
        kind, lengths, offsets = _read_index(idx_path)
        tokens = _read_tokens(bin_path, kind, lengths, offsets)
    except OSError as error:
        raise DataError(
            f"{prefix} cannot be read: {error.strerror or error}", mend="check the files' permissions"
        ) from None
    made = _description(_file(prefix, ".json"))
    if made and (made.documents, made.tokens) != (len(lengths), len(tokens)):
        raise DataError(
            f"{prefix}.json is of another dataset: {made.documents} documents and {made.tokens} tokens, not "
            f"{len(lengths)} and {len(tokens)}",
            mend=AGAIN,
        )
    return Reader(tokens, lengths, offsets, made)


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """Format of tokens, lengths and offsets."""
    size = path.stat().st_size
    if size < HEADER.itemsize:
        raise DataError(f"{path} is cut short: {size} bytes", mend=AGAIN)
    raw = np.memmap(path, mode="r")
    header = raw[: HEADER.itemsize].view(HEADER)[0]
    if header["magic"] != MAGIC.rstrip(b"\0") or header["version"] != 1 or int(header["code"]) not in CODES:
        raise DataError(f"{path} is not an index of megatron-core's format", mend=AGAIN)
    n, bounds = int(header["sequences"]), int(header["bounds"])
    needed = HEADER.itemsize + 4 * n + 8 * n + 8 * bounds
    if size != needed:
        raise DataError(f"{path} has {size} bytes, for {n} documents it should have {needed}", mend=AGAIN)
    lengths, offsets, ends = np.split(raw[HEADER.itemsize :], [4 * n, 12 * n])
    if not bounds or int(ends.view("<i8")[-1]) != n:
        raise DataError(f"{path} is damaged: its documents do not end where its sequences do", mend=AGAIN)
    return np.dtype(CODES[int(header["code"])]).newbyteorder("<"), lengths.view("<i4"), offsets.view("<i8")


def _read_tokens(path: Path, kind: np.dtype, lengths: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The tokens of all documents, of which the index speaks."""
    size, needed = path.stat().st_size, int(lengths.sum(dtype=np.int64)) * kind.itemsize
    if size != needed:
        raise DataError(f"{path} has {size} bytes, its index says {needed}", mend=AGAIN)
    if len(lengths) and int(offsets[-1]) + int(lengths[-1]) * kind.itemsize != size:
        raise DataError(f"{path} does not end where its index says", mend=AGAIN)
    return np.memmap(path, dtype=kind, mode="r") if needed else np.empty(0, kind)


def _description(path: Path) -> Description | None:
    """What PREFIX.json says, or None where another tool made the dataset."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return Description(**{**facts, "tokenizer": Origin(**facts["tokenizer"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} cannot be read: {error!r}", mend=AGAIN) from None


def _file(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)
