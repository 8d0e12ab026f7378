"""The files of a dataset while they are written: tokens and lengths are appended, and can be continued after a death.

    .NAME.bin.part, .NAME.lengths.part    the tokens and the document lengths so far
    .NAME.lock                            locked by the process that writes

DatasetWriter: appends, and gives the files their names when all data is on disk. check_output: refuses an output that
would replace an input.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from megascale.config.dataset_files import MAGIC
from megascale.core.errors import DataError
from megascale.core.files import exists, lock_to_build, sync_folder
from megascale.core.limits import os_error_hint
from megascale.data.read.indexed_dataset import DTYPE_CODES, HEADER, DatasetInfo, TokenizerInfo

MAX_LENGTH = 2**31 - 1  # tokens of a document at most: its length is an i32
LENGTH_BYTES = 4  # bytes of the length of a document
BLOCK_ENTRIES = 1 << 20  # entries of the index that are computed at once
ENDINGS = (".bin", ".lengths", ".idx", ".json")  # endings of the files that are written as `.NAME` + ending + `.part`


def token_dtype(vocab_size: int) -> type[np.generic]:
    """The dtype that megatron-core chooses for a vocabulary: u16 below 65,500 tokens, else i32."""
    return np.uint16 if vocab_size < 65_500 else np.int32


def check_output(prefix: Path, inputs: Iterable[Path]) -> None:
    """Make the folder of a dataset that will be written, and refuse one whose files would replace one of `inputs`.

    Raises: DataError before hours of work are spent
    """
    if prefix.name in ("", ".."):
        raise DataError(f"{prefix} is a folder", hint=f"add a name for the files: {prefix / 'NAME'}")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"the folder {prefix.parent} cannot be made: {error.strerror}"
        raise DataError(reason, hint=os_error_hint(error, "another --output")) from None
    read = {_file_id(path) for path in inputs} - {None}
    for ending in (".bin", ".idx", ".json"):
        target = prefix.with_name(prefix.name + ending)
        if _file_id(target) in read:
            raise DataError(f"{target} would be overwritten, but it is read", hint="another --output")


def _file_id(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file, which are those of all its paths; None without a file."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def can_continue(prefix: Path, dtype: type[np.generic], start: tuple[int, int]) -> bool:
    """Return True if an earlier writer has left all of its first `start` = (tokens, documents)."""
    sizes = {".bin": start[0] * np.dtype(dtype).itemsize, ".lengths": start[1] * LENGTH_BYTES}
    with explained_write(prefix):
        return all(_size(_part(prefix, ending)) >= size for ending, size in sizes.items())


class DatasetWriter:
    """Writes the dataset `prefix`, from `start` = (tokens, documents) of an earlier writer on; keeps what is written if
    it is left without `commit` or `discard`.

    An older dataset of the same prefix is replaced at the end, and its files are never mixed with the new ones.
    Every method raises DataError if a file cannot be written, and the constructor if another process writes the prefix.
    """

    def __init__(self, prefix: Path, dtype: type[np.generic], start: tuple[int, int, int] = (0, 0, -1)) -> None:
        self.prefix = prefix
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self.tokens, self.documents, self.highest_token = start
        with explained_write(self.prefix):
            lock = lock_to_build(prefix)
            if lock is None:
                raise DataError(f"another process writes {prefix}", hint="wait for it, or another --output")
            self._lock = lock
            self._bin = _open_at(_part(self.prefix, ".bin"), self.tokens * self._dtype.itemsize)
            self._lengths = _open_at(_part(self.prefix, ".lengths"), self.documents * LENGTH_BYTES)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._bin, self._lengths, self._lock):
            with suppress(OSError):  # what a full disk has no space for was not flushed, and does not count
                file.close()
        Path(self._lock.name).unlink(missing_ok=True)

    def append(self, tokens: np.ndarray, lengths: np.ndarray, vocab_size: int | None = None) -> None:
        """Append tokens, and the lengths of the documents that end with them; `lengths` sum to the tokens since the
        last document that ended. `vocab_size`: above the highest token.

        Raises: DataError for a document or a token that cannot be stored
        """
        if len(lengths) and int(lengths.max()) > MAX_LENGTH:
            number = int(lengths.argmax())
            what = f"document {self.documents + number} has {lengths[number]:,} tokens; {MAX_LENGTH:,} fit"
            raise DataError(what, hint="split it")
        highest = int(tokens.max()) if len(tokens) else -1
        if vocab_size is not None and highest >= vocab_size:
            what = f"document {self.documents} has token {highest}, but the vocabulary has {vocab_size}"
            raise DataError(what, hint="fix the tokenizer")
        with explained_write(self.prefix):
            self._bin.write(np.ascontiguousarray(tokens, self._dtype).data)
            self._lengths.write(lengths.astype("<i4").data)
        self.tokens += len(tokens)
        self.documents += len(lengths)
        self.highest_token = max(self.highest_token, highest)

    def flush(self) -> tuple[int, int, int]:
        """Flush all data to disk; return the tokens, documents and highest token there, for a later writer."""
        with explained_write(self.prefix):
            for file in (self._bin, self._lengths):
                file.flush()
                os.fsync(file.fileno())
        return self.tokens, self.documents, self.highest_token

    def commit(self, origin: TokenizerInfo | None, vocab_size: int, *leftovers: Path) -> DatasetInfo:
        """Give the files their names; without `origin`, the dataset has no PREFIX.json. `leftovers`: files that are
        removed then.
        """
        if not self.documents:
            raise DataError("the input has no text", hint="check the files and --key")
        sizes = vocab_size, self.tokens, self.documents
        info = DatasetInfo(*sizes, origin or TokenizerInfo("", "", 0), self.highest_token)
        self.flush()
        with explained_write(self.prefix):
            self._write_index()
            if origin is not None:
                self._write(".json", [(json.dumps(asdict(info), indent=1) + "\n").encode()])
            for ending in (".idx", ".json", ".bin"):
                self._final(ending).unlink(missing_ok=True)
            # tokens are last: after a death before that, a later writer has all that it needs to continue
            for ending in (".idx", ".json", ".bin") if origin else (".idx", ".bin"):
                _part(self.prefix, ending).replace(self._final(ending))
            for path in (*leftovers, _part(self.prefix, ".lengths")):
                path.unlink(missing_ok=True)
            sync_folder(self.prefix.parent)
        return info

    def discard(self) -> None:
        for ending in ENDINGS:
            _part(self.prefix, ending).unlink(missing_ok=True)

    def _write_index(self) -> None:
        """Write the index from the lengths on disk, a block of entries at a time."""
        n, item = self.documents, self._dtype.itemsize
        code = next(code for code, known in DTYPE_CODES.items() if np.dtype(known) == self._dtype.newbyteorder("="))
        # numpy strips trailing zeros when it reads 'S9', but writes all nine bytes
        header = np.array([(MAGIC, 1, code, n, n + 1)], dtype=HEADER)
        lengths = np.memmap(_part(self.prefix, ".lengths"), dtype="<i4", mode="r")
        starts = range(0, n, BLOCK_ENTRIES)

        def offsets() -> Iterable[np.ndarray]:
            first = 0
            for start in starts:
                ends = np.cumsum(lengths[start : start + BLOCK_ENTRIES], dtype="<i8") * item + first
                yield np.concatenate(([first], ends[:-1])).astype("<i8")
                first = int(ends[-1])

        bounds = (
            np.arange(start, min(start + BLOCK_ENTRIES, n + 1), dtype="<i8") for start in range(0, n + 1, BLOCK_ENTRIES)
        )
        self._write(".idx", [header, *(lengths[s : s + BLOCK_ENTRIES] for s in starts)], offsets(), bounds)

    def _write(self, ending: str, *parts: Iterable[Any]) -> None:
        with open(_part(self.prefix, ending), "wb") as file:
            for some in parts:
                for part in some:
                    file.write(part)
            file.flush()
            os.fsync(file.fileno())

    def _final(self, ending: str) -> Path:
        return self.prefix.with_name(self.prefix.name + ending)


@contextmanager
def explained_write(prefix: Path) -> Iterator[None]:
    """Raise a DataError in place of an OSError: `prefix` cannot be written."""
    try:
        yield
    except OSError as error:
        hint = os_error_hint(error, "another --output")
        raise DataError(f"{prefix} cannot be written: {error.strerror or error}", hint=hint) from None


def _open_at(path: Path, size: int) -> IO[bytes]:
    """Open a file to append after its first `size` bytes. Raises: DataError for a file that has fewer; OSError"""
    if (found := _size(path)) < size:
        raise DataError(f"{path} has {found} bytes, not {size}", hint="the same command again, which starts anew")
    file = open(path, "ab")  # noqa: SIM115  the writer closes it
    file.truncate(size)
    return file


def _size(path: Path) -> int:
    return path.stat().st_size if exists(path) else 0


def _part(prefix: Path, ending: str) -> Path:
    return prefix.with_name(f".{prefix.name}{ending}.part")
