"""Token files of other projects, read in blocks of tokens, with the lengths of their documents where a file says them.

raw tokens          nanoGPT's .bin, OLMo's .npy: no header; documents are divided by a token
llm.c, modded-nanogpt  .bin with a header of 256 i32: magic, version, number of tokens; divided by a token
NumPy               .npy with NumPy's own header; divided by a token
TNTIDX              .bin and .idx of fairseq and the first Megatron-LM
MMIDIDX 2, 3        .bin and .idx of Fast-LLM without spans; version 1, Megatron-LM's, needs no import
LitData             a folder with index.json and chunks
Parquet, Arrow      a column of lists of token ids, as of Hugging Face's datasets
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megascale.core.errors import DataError
from megascale.core.files import is_file, is_folder, why_unreadable
from megascale.data.prepare.inputs import explained
from megascale.data.read.indexed_dataset import DTYPE_CODES

BLOCK_TOKENS = 16 << 20
"""Tokens that are read at once."""

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

TORCHNET_MAGIC, INDEX_MAGIC = b"TNTIDX\x00\x00", b"MMIDIDX\x00\x00"


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
            return _indexed(prefix, index)
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


def _indexed(prefix: Path, index: Path) -> ForeignFile:
    with open(index, "rb") as file:
        magic = file.read(9)
        version = struct.unpack("<Q", file.read(8))[0] if magic == INDEX_MAGIC else 0
    pair = [index, prefix.with_name(prefix.name + ".bin")]
    if magic.startswith(TORCHNET_MAGIC):
        return ForeignFile(prefix, "TNTIDX", False, lambda: _torchnet(prefix, index), pair)
    if magic == INDEX_MAGIC and version in (2, 3):
        return ForeignFile(prefix, f"MMIDIDX {version}", False, lambda: _fast_llm(prefix, index, version), pair)
    if magic == INDEX_MAGIC and version == 1:
        what = f"{prefix} is in Megatron-LM's format, which training reads as it is"
        raise DataError(what, hint=f'data.train = "{prefix}"')
    raise DataError(f"{index} is in no known format", hint="see the table of formats in docs/data.md")


def _torchnet(prefix: Path, index: Path) -> Iterator[Block]:
    """Read TNTIDX: i64 offsets of dimensions [n + 1] and of data [n + 1], sizes [s], in elements. Megatron-LM adds the
    bounds of documents in sequences; without them the file is fairseq's, whose tokens are stored as token + 1.
    """
    raw = np.fromfile(index, np.uint8)
    if len(raw) < 56 or len(raw) % 8:
        raise DataError(f"{index} is cut short: {len(raw)} bytes", hint="copy all files of the dataset again")
    _, code, _, n, s = np.frombuffer(raw, "<u8", 5, 8).tolist()
    megatron = len(raw) > 48 + 8 * (2 * (n + 1) + s)
    start = 56 if megatron else 48
    entries = np.frombuffer(raw, "<i8", offset=start)
    bounds = int(np.frombuffer(raw, "<u8", 1, 48)[0]) if megatron else 0
    if len(entries) != 2 * (n + 1) + s + bounds or s != n:
        what = f"{index} has {len(raw)} bytes, which are not {n} sequences of one dimension"
        raise DataError(what, hint="copy all files of the dataset again")
    sizes = entries[2 * (n + 1) : 2 * (n + 1) + s]
    ends = entries[2 * (n + 1) + s :] if megatron else np.arange(n + 1)
    tokens = _raw_array(prefix.with_name(prefix.name + ".bin"), _token_dtype(index, code), 0)
    sums = np.concatenate(([0], np.cumsum(sizes)))
    if sums[-1] != len(tokens) or len(ends) == 0 or ends[0] != 0 or ends[-1] != n or (np.diff(ends) < 0).any():
        what = f"{index} is damaged: {sums[-1]} tokens in {n} sequences, but {len(tokens)} in the .bin"
        raise DataError(what, hint="copy all files of the dataset again")
    for part, lengths in _by_document(tokens, np.diff(sums[ends])):
        yield (part if megatron else part.astype(np.int64) - 1), lengths


def _fast_llm(prefix: Path, index: Path, version: int) -> Iterator[Block]:
    """Read MMIDIDX 2 or 3: a byte that says if there are spans, one more in version 3, then as version 1."""
    raw = np.fromfile(index, np.uint8)
    flags = raw[17 : 16 + version]
    if flags.any():
        what = f"{index} has spans that are left out of the loss, which a dataset here cannot have"
        raise DataError(what, hint="write the dataset without spans")
    code = int(raw[16 + version])
    n, _ = np.frombuffer(raw, "<u8", 2, 17 + version).tolist()
    if len(raw) < 33 + version + 12 * n:
        raise DataError(f"{index} is cut short: {len(raw)} bytes", hint="copy all files of the dataset again")
    lengths = np.frombuffer(raw, "<i4", n, 33 + version).astype(np.int64)
    tokens = _raw_array(prefix.with_name(prefix.name + ".bin"), _token_dtype(index, code), 0)
    if lengths.sum() != len(tokens) or (n and lengths.min() < 0):
        what = f"{index} is damaged: documents have {lengths.sum()} tokens, the .bin has {len(tokens)}"
        raise DataError(what, hint="copy all files of the dataset again")
    yield from _by_document(tokens, lengths)


def _token_dtype(index: Path, code: int) -> np.dtype:
    if code not in DTYPE_CODES:
        raise DataError(f"{index} has values of dtype code {code}, which are no tokens", hint="a dataset of token ids")
    return np.dtype(DTYPE_CODES[code]).newbyteorder("<")


def _by_document(tokens: np.ndarray, lengths: np.ndarray) -> Iterator[Block]:
    """Yield blocks of whole documents."""
    ends, first, start = np.cumsum(lengths), 0, 0
    while first < len(lengths):
        last = max(int(np.searchsorted(ends, start + BLOCK_TOKENS, side="right")), first + 1)
        yield tokens[start : int(ends[last - 1])], lengths[first:last]
        first, start = last, int(ends[last - 1])


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

    with explained(str(path)):
        for batch in _batches(path, key):
            column = batch.column(key)
            if not hasattr(column, "flatten") or not pyarrow.types.is_integer(column.flatten().type):
                what = f"{path} has {column.type} in column '{key}', not lists of token ids"
                raise DataError(what, hint="--key COLUMN")
            if column.null_count or column.flatten().null_count:
                raise DataError(f"{path} has nulls in column '{key}'", hint="remove these rows")
            lengths = np.array([len(ids) for ids in column], dtype=np.int64)
            yield column.flatten().to_numpy(), lengths


def _batches(path: Path, key: str) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    if path.suffix == ".arrow":
        source = pyarrow.memory_map(str(path))
        reader: Any = pyarrow.ipc.open_stream(source)
        names, batches = reader.schema.names, reader
    else:
        table = parquet.ParquetFile(path)
        names = table.schema_arrow.names
        batches = table.iter_batches(1024, columns=[key]) if key in names else ()
    if key not in names:
        what = f"{path} has no column '{key}': its columns are {', '.join(names[:8])}"
        raise DataError(what, hint="--key COLUMN, such as input_ids")
    yield from batches
