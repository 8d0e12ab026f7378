"""Token files of other projects, read in blocks of tokens, with the lengths of their documents where a file says them.

raw tokens          nanoGPT's .bin, OLMo's .npy: no header; documents are divided by a token
llm.c, modded-nanogpt  .bin with a header of 256 i32: magic, version, number of tokens; divided by a token
NumPy               .npy with NumPy's own header; divided by a token
LitData             a folder with index.json and chunks
Parquet, Arrow      a column of lists of token ids, as of Hugging Face's datasets

Megatron-LM's .bin and .idx need no import.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megascale.config.dataset_files import read_dataset_files
from megascale.core.errors import DataError
from megascale.core.files import is_file, is_folder, why_unreadable
from megascale.data.prepare.inputs import explained

BLOCK_TOKENS = 16 << 20  # tokens that are read at once

Block = tuple[np.ndarray, np.ndarray | None]
"""Tokens, and the lengths of the documents that they consist of; None if a token divides documents."""

LLMC_HEADER = np.dtype([("magic", "<i4"), ("version", "<i4"), ("tokens", "<i4"), ("rest", "<i4", 253)])
LLMC_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""dtype of the tokens by magic and version of llm.c, for GPT-2 and Llama 3."""

LITDATA_DTYPES = {
    "no_header_tensor": {11: "<u1", 12: "<i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8"},
    "no_header_numpy": {0: "<i1", 1: "<i2", 2: "<i4", 3: "<i8", 4: "<u1", 5: "<u2", 6: "<u4", 7: "<u8"},
}
"""dtype of the items of a LitData dataset of token arrays, by the number in its format."""

ARRAY_HINT = "a one-dimensional array of token ids"


@dataclass(frozen=True)
class ForeignFile:
    """A file or folder of another project. `format`: for the user; `divided`: a token divides documents; `files`: all
    that are read.
    """

    path: Path
    format: str
    divided: bool
    read: Callable[[], Iterator[Block]]
    files: Sequence[Path]


def open_foreign(path: Path, dtype: str | None, key: str) -> ForeignFile:
    """Find out the format of a file, folder, or prefix of .bin and .idx. `dtype`: of raw tokens. `key`: the column of
    token ids.

    Raises: DataError for what is in no known format
    """
    with explained(str(path)):
        prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        index, tokens = (prefix.with_name(prefix.name + ending) for ending in (".idx", ".bin"))
        for part in path.iterdir() if is_folder(path) else filter(is_file, (path, index, tokens)):
            if reason := why_unreadable(part):  # a git-lfs pointer would be read as tokens
                raise DataError(reason, hint="the files that hold the tokens")
        if is_folder(path):
            return ForeignFile(path, "LitData", False, lambda: _litdata(path), list(path.iterdir()))
        if is_file(index) and (path.suffix != ".bin" or is_file(tokens)):
            read_dataset_files(str(prefix))
            what = f"{prefix} is in Megatron-LM's format, which training reads as it is"
            raise DataError(what, hint=f'data.train = "{prefix}"')
        if path.suffix in (".parquet", ".arrow"):
            return ForeignFile(path, path.suffix[1:].capitalize(), False, lambda: _lists(path, key), [path])
        return _stream(path, dtype)


def _stream(path: Path, dtype: str | None) -> ForeignFile:
    """Open a file that is an array of tokens, after a header or none."""
    with open(path, "rb") as file:
        head = file.read(LLMC_HEADER.itemsize)
    if head[:6] == b"\x93NUMPY":
        return ForeignFile(path, "NumPy", True, lambda: _blocks(_numpy_array(path)), [path])
    if len(head) == LLMC_HEADER.itemsize:
        [header] = np.frombuffer(head, LLMC_HEADER)
        if (key := (int(header["magic"]), int(header["version"]))) in LLMC_DTYPES:
            tokens = _raw_array(path, np.dtype(LLMC_DTYPES[key]), LLMC_HEADER.itemsize)
            if len(tokens) != header["tokens"]:
                what = f"{path} has {len(tokens)} tokens, its header says {header['tokens']}"
                raise DataError(what, hint="copy the file again")
            return ForeignFile(path, "llm.c", True, lambda: _blocks(tokens), [path])
    if dtype is None:
        what = f"{path} has no header of a known format"
        raise DataError(what, hint="for raw tokens, as of nanoGPT (uint16) or OLMo (uint32), --dtype DTYPE")
    return ForeignFile(path, f"raw {dtype}", True, lambda: _blocks(_raw_array(path, np.dtype(dtype), 0)), [path])


def _raw_array(path: Path, dtype: np.dtype, start: int) -> np.ndarray:
    size = path.stat().st_size - start
    if size % dtype.itemsize:
        raise DataError(f"{path}: {size} bytes are no whole number of {dtype.name}", hint="another --dtype")
    return np.memmap(path, dtype, "r", offset=start) if size else np.empty(0, dtype)


def _numpy_array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r")  # without pickles
    except ValueError as error:
        raise DataError(f"{path} is no array of numbers: {error}", hint=ARRAY_HINT) from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        what = f"{path} has shape {array.shape} of {array.dtype}"
        raise DataError(what, hint=ARRAY_HINT)
    return np.asarray(array)


def _blocks(tokens: np.ndarray) -> Iterator[Block]:
    return ((tokens[start : start + BLOCK_TOKENS], None) for start in range(0, len(tokens), BLOCK_TOKENS))


def _litdata(folder: Path) -> Iterator[Block]:
    """Read LitData's chunks: u32 number of items n, u32 [n + 1] offsets in bytes, items, which are arrays of tokens."""
    try:
        facts = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        config, names = facts["config"], [str(chunk["filename"]) for chunk in facts["chunks"]]
        [kind, number] = str(config["data_format"][0]).split(":")
        dtype = np.dtype(LITDATA_DTYPES[kind][int(number)])
    except (OSError, ValueError, LookupError, TypeError) as error:
        what = f"{folder} is no LitData dataset of token arrays: {error!r}"
        raise DataError(what, hint=f"an index.json whose data_format is {' or '.join(LITDATA_DTYPES)}") from None
    if config.get("compression"):
        raise DataError(f"{folder} is compressed by {config['compression']}", hint="write it without compression")
    for name in names:
        raw = np.fromfile(folder / Path(name).name, np.uint8)
        n = int(np.frombuffer(raw, "<u4", 1)[0]) if len(raw) >= 4 else -1
        offsets = np.frombuffer(raw, "<u4", n + 1, 4).astype(np.int64) if 0 <= n <= len(raw) // 4 - 2 else np.empty(0)
        sizes = np.diff(offsets)
        if not len(offsets) or offsets[-1] != len(raw) or (sizes < 0).any() or (sizes % dtype.itemsize).any():
            raise DataError(f"{folder / name} is damaged", hint="copy the folder again")
        yield np.frombuffer(raw, dtype, offset=int(offsets[0])), sizes // dtype.itemsize


def _lists(path: Path, key: str) -> Iterator[Block]:
    """Read a column of lists of token ids, a batch of rows at a time."""
    import pyarrow
    from pyarrow import parquet

    with explained(str(path)):
        if path.suffix == ".arrow":
            batches: Any = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
            names = batches.schema.names
        else:
            table = parquet.ParquetFile(path)
            names, batches = table.schema_arrow.names, table.iter_batches(1024, columns=[key])
        if key not in names:
            what = f"{path} has no column '{key}': its columns are {', '.join(names[:8])}"
            raise DataError(what, hint="--key COLUMN, such as input_ids")
        for batch in batches:
            column = batch.column(key)
            if not hasattr(column, "flatten") or not pyarrow.types.is_integer(column.flatten().type):
                what = f"{path} has {column.type} in column '{key}', not lists of token ids"
                raise DataError(what, hint="--key COLUMN")
            if column.null_count or column.flatten().null_count:
                raise DataError(f"{path} has nulls in column '{key}'", hint="remove these rows")
            lengths = np.array([len(ids) for ids in column], dtype=np.int64)
            yield column.flatten().to_numpy(), lengths
