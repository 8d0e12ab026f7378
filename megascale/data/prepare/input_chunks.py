"""The chunks of an input file, which workers tokenize: some lines, some rows, or a piece of a text.

The chunks of a file depend on its content alone, so that a killed preparation can continue after the last finished one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal

from megascale.core.errors import DataError
from megascale.data.prepare.inputs import JSON_LINES, TABLES, InputFile, explained, open_input

CHUNK_BYTES = 1 << 20
"""Bytes of a chunk of lines or rows, at least."""

PIECE_BYTES = 8 << 20
"""Bytes of a text that are tokenized at once. A longer text is tokenized in pieces, cut between two lines."""

MAX_LINE_BYTES = 1 << 30

BATCH_ROWS = 64
"""Rows of a table that are read at once."""


@dataclass(frozen=True)
class Chunk:
    """A part of a file. `kind`: `data` are lines of JSON, a piece of a text, or a batch of rows in Arrow's format.
    `first`: the number of the first line or row, from 1. `begins`, `ends`: whether a piece is the first, or the last,
    of its text. `size`: bytes of the file that were read for it.
    """

    file: str
    kind: Literal["lines", "text", "rows"]
    data: bytes
    size: int
    first: int = 1
    begins: bool = True
    ends: bool = True


def read_chunks(file: InputFile, column: str) -> Iterator[Chunk]:
    """Yield the chunks of a file. `column`: the key of the text, of which a table's column is read.

    Raises: DataError for a file that cannot be read or lacks the column
    """
    with explained(file.name):
        if file.suffixes[0] in TABLES:
            yield from _rows(file, column)
            return
        with open_input(file) as (raw, content):
            read = _lines if file.suffixes[0] in JSON_LINES else _pieces
            yield from read(file.name, raw, content)


def _lines(name: str, raw: IO[bytes], content: IO[bytes]) -> Iterator[Chunk]:
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


def _pieces(name: str, raw: IO[bytes], content: IO[bytes]) -> Iterator[Chunk]:
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


def _rows(file: InputFile, column: str) -> Iterator[Chunk]:
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
            pending.append(batch)
            count, size = count + batch.num_rows, size + batch.nbytes
            if size >= CHUNK_BYTES:
                reached = file.size * (first - 1 + count) // total
                yield Chunk(file.name, "rows", _arrow_bytes(pending), reached - position, first)
                first, pending, position, count, size = first + count, [], reached, 0, 0
        if pending:
            yield Chunk(file.name, "rows", _arrow_bytes(pending), file.size - position, first)


def _check_column(name: str, schema: Any, column: str) -> None:
    """Raises: DataError for a table without the column, or with one of another type"""
    import pyarrow

    try:
        field = field_of(schema, column)
    except KeyError:
        names = ", ".join(schema.names[:8]) + (", ..." if len(schema.names) > 8 else "")
        raise DataError(f"{name} has no column '{column}': its columns are {names}", hint="--key COLUMN") from None
    if not (pyarrow.types.is_string(field.type) or pyarrow.types.is_large_string(field.type)):
        raise DataError(f"{name} has {field.type} in column '{column}', not texts", hint="--key COLUMN")


def field_of(schema: Any, column: str) -> Any:
    """The field of a schema, or of a struct in it: `a.b`.

    Raises: KeyError
    """
    if column in schema.names:
        return schema.field(column)
    head, _, rest = column.partition(".")
    field = schema.field(head)
    for part in rest.split("."):
        index = field.type.get_field_index(part) if hasattr(field.type, "get_field_index") else -1
        if index < 0:
            raise KeyError(column)
        field = field.type.field(index)
    return field


def _arrow_bytes(batches: list[Any]) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def _read_full(stream: IO[bytes], size: int) -> bytes:
    """Read `size` bytes, fewer at the end of the stream only: a read of a stream may return less."""
    block = stream.read(size)
    if len(block) in (0, size):
        return block
    parts, missing = [block], size - len(block)
    while missing and (block := stream.read(missing)):
        parts.append(block)
        missing -= len(block)
    return b"".join(parts)
