"""The documents of an input file: its chunks, which workers tokenize, and the texts in a chunk.

The chunks of a file depend on its content alone, so that a killed preparation can continue after the last finished one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal

from megascale.core.errors import DataError
from megascale.data.prepare.inputs import JSON_LINES, TABLES, InputFile, explained, open_input

CHUNK_BYTES = 1 << 20  # bytes of a chunk of lines or rows, at least

PIECE_BYTES = 8 << 20
"""Bytes of a text that are tokenized at once. A longer text is tokenized in pieces, cut between two lines."""

MAX_LINE_BYTES = 1 << 30

BATCH_ROWS = 64  # rows of a table that are read at once

OBJECT_HINT = '{"text": "..."} on each line'
ARRAY_HINT = f"{OBJECT_HINT}; `jq -c '.[]'` writes a JSON array so"

KINDS = {str: "a text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
"""Names of the types of JSON's values."""


@dataclass(frozen=True)
class Chunk:
    """A part of a file. `data`: lines of JSON, a piece of a text, or an Arrow array of texts, by `kind`. `first`: the
    number of the first line or row, from 1. `begins`, `ends`: whether a piece is the first, or the last, of its text.
    `size`: bytes of the file read for the chunk.
    """

    file: str
    kind: Literal["lines", "text", "rows"]
    data: Any
    size: int
    first: int = 1
    begins: bool = True
    ends: bool = True

    @property
    def held_bytes(self) -> int:
        return self.data.nbytes if self.kind == "rows" else len(self.data)


def read_chunks(file: InputFile, column: str) -> Iterator[Chunk]:
    """Yield the chunks of a file. `column`: the key of the text, of which a table's column is read.

    Raises: DataError for a file that cannot be read or lacks the column
    """
    with explained(file.name):
        if file.suffixes[0] in TABLES:
            yield from _read_rows(file, column)
            return
        with open_input(file) as (raw, content):
            read = _read_lines if file.suffixes[0] in JSON_LINES else _read_pieces
            yield from read(file.name, raw, content)


def _read_lines(name: str, raw: IO[bytes], content: IO[bytes]) -> Iterator[Chunk]:
    number, rest, position = 1, bytearray(), 0
    while block := _read_full(content, CHUNK_BYTES):
        end = block.rfind(b"\n") + 1
        if not end:
            rest += block
            if len(rest) > MAX_LINE_BYTES:
                what = f"{name}:{number} is longer than {MAX_LINE_BYTES} bytes"
                raise DataError(what, hint="a file of plain text may have any length")
            continue
        data = bytes(rest + block[:end]) if rest else block[:end]
        yield Chunk(name, "lines", data, raw.tell() - position, number)
        number, rest, position = number + data.count(b"\n"), bytearray(block[end:]), raw.tell()
    if rest:
        yield Chunk(name, "lines", bytes(rest), raw.tell() - position, number)


def _read_pieces(name: str, raw: IO[bytes], content: IO[bytes]) -> Iterator[Chunk]:
    rest, begins, position = b"", True, 0
    while block := _read_full(content, PIECE_BYTES):
        rest += block
        while len(rest) > PIECE_BYTES:
            end = cut_point(rest)
            yield Chunk(name, "text", rest[:end], raw.tell() - position, begins=begins, ends=False)
            rest, begins, position = rest[end:], False, raw.tell()
    yield Chunk(name, "text", rest, raw.tell() - position, begins=begins, ends=True)


LINE_END = re.compile(rb"(?<=\S)\n(?=\S)")
SEARCHED_BYTES = 64 << 10


def cut_point(text: bytes) -> int:
    """The end of the first piece of a text of more than PIECE_BYTES: the last place between two lines of the piece, of
    which the second does not begin with white space; or before a space; or between characters. Tokenizers that divide
    a text at lines before they merge give the same tokens as for the whole.
    """
    start = PIECE_BYTES - min(SEARCHED_BYTES, PIECE_BYTES // 2)
    ends = [match.end() for match in LINE_END.finditer(text, start, PIECE_BYTES + 1)]
    if ends:
        return ends[-1]
    if (space := text.rfind(b" ", start, PIECE_BYTES)) > 0:
        return space
    end = PIECE_BYTES
    while end > PIECE_BYTES - 3 and text[end] & 0xC0 == 0x80:  # a byte within a character
        end -= 1
    return end


def split_text(text: str) -> list[str]:
    """The pieces in which a text is tokenized."""
    if len(text) <= PIECE_BYTES // 4:
        return [text]
    data, pieces = text.encode(), []
    while len(data) > PIECE_BYTES:
        end = cut_point(data)
        pieces.append(data[:end].decode())
        data = data[end:]
    return [*pieces, data.decode()]


def _read_rows(file: InputFile, column: str) -> Iterator[Chunk]:
    """Yield the rows of a table's column, which may be a field of a struct: `a.b`."""
    import pyarrow
    from pyarrow import parquet

    if file.suffixes[1]:
        raise DataError(f"{file.name}: a .parquet file has its own compression", hint="decompress it")
    with open_input(file) as (raw, _):
        try:
            table = parquet.ParquetFile(raw, pre_buffer=False)
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{file.name} is no .parquet file: {error}", hint="copy the file again") from None
        _check_column(file.name, table.schema_arrow, column)
        total, first, pending, position = max(table.metadata.num_rows, 1), 1, [], 0
        count = size = 0
        for batch in table.iter_batches(BATCH_ROWS, columns=[column]):
            count, size = count + batch.num_rows, size + batch.nbytes
            texts = batch.column(0)
            while pyarrow.types.is_struct(texts.type):
                texts = texts.flatten()[0]  # a nested column is read without its siblings; a null above is a null
            pending.append(texts)
            if size >= CHUNK_BYTES:
                reached = file.size * (first - 1 + count) // total
                yield Chunk(file.name, "rows", pyarrow.chunked_array(pending), reached - position, first)
                first, pending, position, count, size = first + count, [], reached, 0, 0
        if pending:
            yield Chunk(file.name, "rows", pyarrow.chunked_array(pending), file.size - position, first)


def _check_column(name: str, schema: Any, column: str) -> None:
    """Raises: DataError for a table without the column, or with one of another type"""
    import pyarrow

    head, *rest = [column] if column in schema.names else column.split(".")
    try:
        kind = schema.field(head).type
        for part in rest:
            kind = kind.field(part).type
    except (KeyError, TypeError, AttributeError):
        names = ", ".join(schema.names[:8]) + (", ..." if len(schema.names) > 8 else "")
        raise DataError(f"{name} has no column '{column}': its columns are {names}", hint="--key COLUMN") from None
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise DataError(f"{name} has {kind} in column '{column}', not texts", hint="--key COLUMN")


def _read_full(stream: IO[bytes], size: int) -> bytes:
    """Read `size` bytes, fewer at the end of the stream only: a read of a stream may return less."""
    parts = []
    while size and (block := stream.read(size)):
        parts.append(block)
        size -= len(block)
    return b"".join(parts)


class BadDocumentError(DataError):
    """A line, row or file that is no text. `reason`: the same for all of a kind; `where`: its file and line or row."""

    def __init__(self, reason: str, where: str, message: str, hint: str) -> None:
        super().__init__(f"{where} {message}", hint=hint)
        self.reason = reason
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return BadDocumentError, (self.reason, self.where, self.message.removeprefix(f"{self.where} "), self.hint)


Documents = Iterator[tuple[str, str | BadDocumentError]]
"""The place, and the text or the error, of each document."""


def read_documents(chunk: Chunk, key: str) -> Documents:
    """Yield (place, text or error) for the documents of a chunk. `key`: the field or column of the text; `a.b` is the
    field b in a, unless a field has that name itself.
    """
    yield from {"lines": _lines, "rows": _rows, "text": _text}[chunk.kind](chunk, key)


def _text(chunk: Chunk, key: str) -> Documents:
    try:
        text = chunk.data.decode("utf-8")
        yield chunk.file, text.removeprefix("\ufeff") if chunk.begins else text
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 at byte {error.start} of {len(chunk.data)} ({chunk.data[error.start]:#04x})"
        hint = "give plain text in UTF-8, or compressed as .gz or .zst"
        yield chunk.file, BadDocumentError("not UTF-8", chunk.file, message, hint)


def _lines(chunk: Chunk, key: str) -> Documents:
    for number, line in enumerate(chunk.data.split(b"\n"), start=chunk.first):
        if line.strip():
            where = f"{chunk.file}:{number}"
            try:
                yield where, _text_of(_parse(line, where), key, where)
            except BadDocumentError as error:
                yield where, error


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise BadDocumentError("not UTF-8", where, f"is not UTF-8: {error}", "fix or remove the line") from None
    except (ValueError, RecursionError) as error:
        hint = ARRAY_HINT if line.strip() in (b"[", b"[{") else "fix or remove the line"
        raise BadDocumentError("not JSON", where, f"is not a line of JSON: {error}", hint) from None
    if not isinstance(record, dict):
        message = f"is {KINDS.get(type(record), 'null')}, not an object with a text"
        hint = ARRAY_HINT if isinstance(record, list) else OBJECT_HINT
        raise BadDocumentError("not an object", where, message, hint)
    return record


def _text_of(record: dict[str, Any], key: str, where: str) -> str:
    """The text under `key`. Raises: BadDocumentError without one"""
    value: Any = record
    for part in [key] if key in record else key.split("."):
        if not isinstance(value, dict) or part not in value:
            keys = ", ".join(list(record)[:8]) + (", ..." if len(record) > 8 else "")
            message = f"has no field '{key}': its fields are {keys or 'none'}"
            raise BadDocumentError(f"no field '{key}'", where, message, "--key FIELD")
        value = value[part]
    if not isinstance(value, str):
        message = f"has {KINDS.get(type(value), 'null')} under '{key}', not a text"
        raise BadDocumentError("not a text", where, message, "--key FIELD, or fix the line")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(value[error.start]):04x}"
        message = f"has {surrogate}, half a character, under '{key}'"
        raise BadDocumentError("half a character", where, message, "fix or remove the line") from None
    return value


def _rows(chunk: Chunk, key: str) -> Documents:
    for number, text in enumerate(chunk.data.to_pylist(), start=chunk.first):
        where = f"{chunk.file} row {number}"
        if text is None:
            message = f"has null in column '{key}', not a text"
            yield where, BadDocumentError("null", where, message, "remove the row")
        else:
            yield where, text
