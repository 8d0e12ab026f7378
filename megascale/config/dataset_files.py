"""The files of a token dataset, checked against one another without reading tokens or the index: a few bytes of each.

The format is megatron-core's (`data/read/indexed_dataset.py`). No numpy here: `megascale check` answers at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megascale.config.data import Blend, DataConfig, SplitName
from megascale.core.errors import DataError
from megascale.core.files import is_file, pointer_notice
from megascale.core.limits import os_error_hint
from megascale.core.readable import file_facts, is_url, open_readable, read_file

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, sequences, document bounds
TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}  # bytes of a token by code of its dtype

PREPARE_AGAIN_HINT = "copy all files of the dataset again, or prepare it again"

READERS = 32  # remote datasets whose files are read at the same time


@dataclass(frozen=True)
class DatasetFiles:
    """Sizes of a dataset: documents and tokens. `dtype_code`: megatron-core's code of the tokens' dtype. `bounds`: the
    number of document bounds. `versions`: of the index and of the tokens, others after a change. `description`: the
    content of PREFIX.json.
    """

    prefix: str
    documents: int
    tokens: int
    dtype_code: int
    bounds: int
    index_bytes: int
    versions: tuple[str, str]
    description: Mapping[str, Any] = field(default_factory=dict)

    @property
    def token_bytes(self) -> int:
        return TOKEN_BYTES[self.dtype_code]

    def tokens_in(self, first: int, last: int) -> int:
        """Count the tokens of documents [first, last), from two entries of the index.

        Raises: DataError
        """
        try:
            with open_readable(f"{self.prefix}.idx") as (file, _):
                starts = [self._start(file, document) for document in (first, last)]
        except OSError as error:
            raise _unreadable(error, self.prefix) from None
        return (starts[1] - starts[0]) // self.token_bytes

    def has_labels_in(self, first: int, last: int) -> bool:
        """Return False if none of documents [first, last) has a second token, its first label. Lengths are read only
        for documents of one token or less on average.

        Raises: DataError
        """
        if self.tokens_in(first, last) > last - first:
            return True
        try:
            with open_readable(f"{self.prefix}.idx") as (file, _):
                file.seek(HEADER.size + 4 * first)
                return any(length > 1 for (length,) in struct.iter_unpack("<i", file.read(4 * (last - first))))
        except OSError as error:
            raise _unreadable(error, self.prefix) from None

    def _start(self, file: Any, document: int) -> int:
        """Byte of the first token of a document."""
        if document >= self.documents:
            return self.tokens * self.token_bytes
        file.seek(HEADER.size + 4 * self.documents + 8 * document)
        start: int = struct.unpack("<q", file.read(8))[0]
        return start


def read_dataset_files(prefix: str) -> DatasetFiles:
    """Read the header and the ends of the index, and compare them with the sizes of both files and with PREFIX.json.

    Raises: DataError for files that cannot be read, are damaged, cut short, of different datasets, or git-lfs pointers.
    """
    try:
        return _read_dataset_files(prefix)
    except DataError:
        for path in map(Path, (f"{prefix}.idx", f"{prefix}.bin", f"{prefix}.json")):
            if is_file(path) and (notice := pointer_notice(path)):
                raise DataError(notice, hint="all files of the dataset") from None
        raise


def _read_dataset_files(prefix: str) -> DatasetFiles:
    try:
        dataset = _read_index(prefix)
        tokens = file_facts(f"{prefix}.bin")
    except FileNotFoundError as error:
        hint = "a prefix is the path without .bin" if is_file(Path(prefix)) else "`megascale data prepare` makes it"
        hint = "check the URL; copy all files of a dataset there" if is_url(prefix) else hint
        raise DataError(f"there is no file {error.filename}", hint=hint) from None
    except OSError as error:
        raise _unreadable(error, prefix) from None
    if tokens.size != dataset.tokens * dataset.token_bytes:
        said = dataset.tokens * dataset.token_bytes
        raise _damaged(f"{prefix}.bin has {tokens.size} bytes, its index says {said}")
    description = read_description(f"{prefix}.json")
    sizes = {"documents": dataset.documents, "tokens": dataset.tokens}
    if any(description.get(key, size) != size for key, size in sizes.items()):
        named = " and ".join(f"{description.get(key)} {key}" for key in sizes)
        own = f"{dataset.documents} and {dataset.tokens}"
        raise _damaged(f"{prefix}.json is of another dataset: {named}, not {own}")
    if (size := description.get("vocab_size", 0)) > 256**dataset.token_bytes:
        why = f"tokens of {dataset.token_bytes} bytes hold no vocabulary of {size}"
        raise _damaged(f"{prefix}.json is of another dataset: {why}")
    return replace(dataset, versions=(dataset.versions[0], tokens.version), description=description)


def read_all_dataset_files(prefixes: Sequence[str]) -> dict[str, DatasetFiles | DataError]:
    """Read the files of several datasets, and the error of those that cannot be used. Remote ones are read at the same
    time, because each takes several requests.
    """

    def read(prefix: str) -> DatasetFiles | DataError:
        try:
            return read_dataset_files(prefix)
        except DataError as error:
            return error

    if not any(map(is_url, prefixes)):
        return {prefix: read(prefix) for prefix in prefixes}
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(prefixes, pool.map(read, prefixes), strict=True))


def read_description(path: str) -> dict[str, Any]:
    """Read PREFIX.json; empty without the file, as for datasets of other tools.

    Raises: DataError for a file that is no object with a vocabulary and a tokenizer.
    """
    try:
        facts = json.loads(read_file(path))
        tokenizer = facts["tokenizer"]
        facts |= {"vocab_size": int(facts["vocab_size"]), "highest_token": int(facts.get("highest_token", -1))}
        facts["tokenizer"] = {**tokenizer, "name": str(tokenizer["name"]), "fingerprint": str(tokenizer["fingerprint"])}
    except FileNotFoundError:
        return {}
    except (OSError, ArithmeticError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise _damaged(f"{path} cannot be read: {error!r}") from None
    return dict(facts)


def without_labels(data: DataConfig, files: DatasetFiles, first: int, last: int) -> str:
    """Tell of documents [first, last) without labels, by their lengths; "" if there may be some.

    Raises: DataError
    """
    within = data.packing == "best_fit" or (data.attention_mask == "document" and data.eod_mask_loss)
    if not within or files.has_labels_in(first, last):
        return ""
    return f"{files.prefix}: none of the {last - first} documents has a second token, so that there is no label"


NO_LABELS_HINT = "documents of two tokens or more"


def other_tokens_hint(tokens: int) -> str:
    """Return the hint for data with a vocabulary of `tokens` and a model with a smaller one, fixed by its weights."""
    return f"data that this model's own tokenizer has prepared, or, for a new model, model.vocab_size = {tokens}"


def split_source(data: DataConfig, split: SplitName) -> tuple[str | Blend | None, tuple[float, float]]:
    """The datasets of a split, and the range [start, stop) of their documents as fractions of their number."""
    if data.valid is not None:
        return (data.train if split == "train" else data.valid), (0.0, 1.0)
    train, valid = data.split
    bound = train / (train + valid)
    return data.train, ((0.0, bound) if split == "train" else (bound, 1.0))


def document_range(documents: int, fractions: tuple[float, float]) -> tuple[int, int]:
    """The documents [first, last) of a split."""
    first, last = (round(documents * edge) for edge in fractions)
    return first, last


def count_tokens(data: DataConfig, split: SplitName) -> Iterator[tuple[float, str, int | DataError]]:
    """Yield the share of every dataset in the samples of a split, its prefix and its tokens; nothing of mock data."""
    source, fractions = split_source(data, split)
    if data.mock or source is None:
        return
    blend: Blend = [(1.0, source)] if isinstance(source, str) else source
    found, total = read_all_dataset_files([prefix for _, prefix in blend]), sum(weight for weight, _ in blend)
    for weight, prefix in blend:
        files = found[prefix]
        tokens = files if isinstance(files, DataError) else files.tokens_in(*document_range(files.documents, fractions))
        yield weight / total, prefix, tokens


def _read_index(prefix: str) -> DatasetFiles:
    path = f"{prefix}.idx"
    with open_readable(path) as (file, facts):
        size, head = facts.size, file.read(HEADER.size)
        if len(head) < HEADER.size:
            raise _damaged(f"{path} is cut short: {size} bytes")
        magic, version, code, n, bounds = HEADER.unpack(head)
        if magic.startswith(b"TNTIDX") or (magic == MAGIC and version != 1):
            raise DataError(f"{path} is an index of another version", hint="one of version 1, as Megatron-LM writes")
        if magic != MAGIC or code not in TOKEN_BYTES:
            raise _damaged(f"{path} is not an index of megatron-core's format")
        needed = HEADER.size + 12 * n + 8 * bounds
        if size not in (needed, needed + n):
            raise _damaged(f"{path} has {size} bytes, for {n} documents it should have {needed}")
        _check_modes(path, file, needed, size)
        if not bounds or _number(file, needed - 8, "<q") != n:
            raise _damaged(f"{path} is damaged: its documents do not end where its sequences do")
        last = _number(file, HEADER.size + 4 * (n - 1), "<i") if n else 0
        end = (_number(file, HEADER.size + 12 * n - 8, "<q") if n else 0) + last * TOKEN_BYTES[code]
    return DatasetFiles(prefix, n, end // TOKEN_BYTES[code], code, bounds, size, (facts.version, ""))


def _check_modes(path: str, file: Any, start: int, end: int) -> None:
    """Check the modes of sequences, a byte each, if the file has them: 0 is text.

    Raises: DataError
    """
    file.seek(start)
    while start < end:
        block = file.read(min(end - start, 1 << 20))
        if not block or any(block):
            what = f"{path} has sequences with a mode other than 0, which are no text"
            raise DataError(what, hint="a dataset of text alone")
        start += len(block)


def _damaged(what: str) -> DataError:
    return DataError(what, hint=PREPARE_AGAIN_HINT)


def _unreadable(error: OSError, prefix: str) -> DataError:
    hint = os_error_hint(error, "check the files and their file system")
    return DataError(f"{error.filename or prefix} cannot be read: {error.strerror or error}", hint=hint)


def _number(file: Any, place: int, kind: str) -> int:
    file.seek(place)
    number: int = struct.unpack(kind, file.read(struct.calcsize(kind)))[0]
    return number
