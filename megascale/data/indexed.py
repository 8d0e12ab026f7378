"""megatron-core's token dataset format, written and read with numpy alone.

PREFIX.bin holds the tokens of all documents one after the other. PREFIX.idx holds, little-endian: 9 bytes of magic, u64
version 1, u8 code of the token format, u64 number of documents n, u64 n + 1, i32[n] lengths in tokens, i64[n] offsets
in bytes, i64[n + 1] bounds of documents (here 0 to n, since a document is one sequence). PREFIX.json is ours: which
tokenizer made it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megascale.core.errors import DataError
from megascale.core.files import atomic, write_text

MAGIC = b"MMIDIDX\x00\x00"
HEADER = np.dtype([("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
CODES: dict[int, type[np.generic]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


@dataclass(frozen=True)
class Description:
    """What PREFIX.json says."""

    vocab_size: int
    tokens: int
    documents: int
    tokenizer: dict[str, Any]  # name, fingerprint, eod


def token_format(vocab_size: int) -> type[np.generic]:
    """The smallest of the format's types that megatron-core would choose: u16 below 65,500 tokens, else i32."""
    return np.uint16 if vocab_size < 65_500 else np.int32


def write(prefix: Path, documents: Iterable[np.ndarray], describe: dict[str, Any], vocab_size: int) -> Description:
    """Write a dataset of `documents` (arrays of ids, eod included). Its files appear when all of it is on disk.

    Raises: DataError if there is no document.
    """
    kind = np.dtype(token_format(vocab_size)).newbyteorder("<")
    lengths: list[int] = []
    with atomic(prefix.with_name(prefix.name + ".bin")) as bin_file:
        for ids in documents:
            bin_file.write(ids.astype(kind, copy=False).tobytes())
            lengths.append(len(ids))
        if not lengths:
            raise DataError("the input has no text", mend="every document was empty: check the files and --key")
    with atomic(prefix.with_name(prefix.name + ".idx")) as idx_file:
        idx_file.write(_index(np.array(lengths, dtype="<i4"), kind))
    description = Description(vocab_size, sum(lengths), len(lengths), describe)
    write_text(prefix.with_name(prefix.name + ".json"), json.dumps(asdict(description), indent=1) + "\n")
    return description


def _index(lengths: np.ndarray, kind: np.dtype) -> bytes:
    n = len(lengths)
    code = next(code for code, known in CODES.items() if np.dtype(known) == kind.newbyteorder("="))
    header = np.array([(MAGIC, 1, code, n, n + 1)], dtype=HEADER)
    offsets = np.zeros(n, dtype="<i8")
    np.cumsum(lengths[:-1].astype("<i8") * kind.itemsize, out=offsets[1:])
    # numpy strips trailing zeros when it reads 'S9', but writes all nine bytes
    return header.tobytes() + lengths.tobytes() + offsets.tobytes() + np.arange(n + 1, dtype="<i8").tobytes()


@dataclass(frozen=True)
class Reader:
    """A dataset, memory-mapped. `lengths` [n] in tokens and `offsets` [n] in bytes, of each document."""

    tokens: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """The ids of a document."""
        start = int(self.offsets[index]) // self.tokens.itemsize
        return self.tokens[start : start + int(self.lengths[index])]


def read(prefix: Path) -> Reader:
    """Open a dataset and check that its two files belong together.

    Raises: DataError for files that are missing, damaged or cut short.
    """
    idx_path, bin_path = prefix.with_name(prefix.name + ".idx"), prefix.with_name(prefix.name + ".bin")
    for path in (idx_path, bin_path):
        if not path.is_file():
            raise DataError(f"there is no file {path}", mend="`megascale data prepare` makes it")
    mend = "prepare the data again"
    if idx_path.stat().st_size < HEADER.itemsize:
        raise DataError(f"{idx_path} is cut short: {idx_path.stat().st_size} bytes", mend=mend)
    raw = np.memmap(idx_path, mode="r")
    header = raw[: HEADER.itemsize].view(HEADER)[0]
    if header["magic"] != MAGIC.rstrip(b"\0") or header["version"] != 1 or int(header["code"]) not in CODES:
        raise DataError(f"{idx_path} is not an index of megatron-core's format", mend=mend)
    n = int(header["sequences"])
    sizes = [4 * n, 8 * n, 8 * int(header["documents"])]
    if idx_path.stat().st_size < HEADER.itemsize + sum(sizes):
        raise DataError(f"{idx_path} is cut short: it should have {HEADER.itemsize + sum(sizes)} bytes", mend=mend)
    body = raw[HEADER.itemsize :]
    lengths = body[: sizes[0]].view("<i4")
    offsets = body[sizes[0] : sizes[0] + sizes[1]].view("<i8")
    kind = np.dtype(CODES[int(header["code"])]).newbyteorder("<")
    needed = int(lengths.sum(dtype=np.int64)) * kind.itemsize
    if bin_path.stat().st_size != needed:
        found = bin_path.stat().st_size
        raise DataError(f"{bin_path} has {found} bytes, its index says {needed}", mend=mend)
    tokens = np.memmap(bin_path, dtype=kind, mode="r") if needed else np.empty(0, kind)
    return Reader(tokens, lengths, offsets)


def describe(prefix: Path) -> Description | None:
    """What PREFIX.json says, or None where another tool made the dataset.

    Raises: DataError if the file is damaged.
    """
    path = prefix.with_name(prefix.name + ".json")
    try:
        return Description(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}", mend="prepare the data again") from None
