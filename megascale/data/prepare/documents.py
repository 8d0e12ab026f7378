"""The documents of a chunk of input: texts, and what is no text and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megascale.core.errors import DataError
from megascale.data.prepare.input_chunks import Chunk

OBJECT_HINT = '{"text": "..."} on each line'
ARRAY_HINT = f"{OBJECT_HINT}; `jq -c '.[]'` writes a JSON array so"


class BadDocumentError(DataError):
    """A line, row or file that is no text. `reason`: the same for all of a kind; `where`: its file and line or row."""

    def __init__(self, reason: str, where: str, message: str, hint: str) -> None:
        super().__init__(f"{where} {message}", hint=hint)
        self.reason = reason
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return BadDocumentError, (self.reason, self.where, self.message.removeprefix(f"{self.where} "), self.hint)


def read_documents(chunk: Chunk, key: str) -> Iterator[tuple[str, str | BadDocumentError]]:
    """Yield (place, text or error) for the documents of a chunk. `key`: the field or column of the text; `a.b` is the
    field b in a, unless a field has that name itself.
    """
    read = {"lines": _lines, "rows": _rows, "text": _text}[chunk.kind]
    yield from read(chunk, key)


def _text(chunk: Chunk, key: str) -> Iterator[tuple[str, str | BadDocumentError]]:
    try:
        text = chunk.data.decode("utf-8")
        yield chunk.file, text.removeprefix("\ufeff") if chunk.begins else text
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 at byte {error.start} of {len(chunk.data)} ({chunk.data[error.start]:#04x})"
        hint = "give plain text in UTF-8, or compressed as .gz or .zst"
        yield chunk.file, BadDocumentError("not UTF-8", chunk.file, message, hint)


def _lines(chunk: Chunk, key: str) -> Iterator[tuple[str, str | BadDocumentError]]:
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
        message = f"is {_kind(record)}, not an object with a text"
        hint = ARRAY_HINT if isinstance(record, list) else OBJECT_HINT
        raise BadDocumentError("not an object", where, message, hint)
    return record


def _text_of(record: dict[str, Any], key: str, where: str) -> str:
    """The text under `key`.

    Raises: BadDocumentError without one
    """
    found, value = _look_up(record, key)
    if not found:
        keys = ", ".join(list(record)[:8]) + (", ..." if len(record) > 8 else "")
        message = f"has no field '{key}': its fields are {keys or 'none'}"
        raise BadDocumentError(f"no field '{key}'", where, message, "--key FIELD")
    if not isinstance(value, str):
        message = f"has {_kind(value)} under '{key}', not a text"
        raise BadDocumentError("not a text", where, message, "--key FIELD, or fix the line")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(value[error.start]):04x}"
        message = f"has {surrogate}, half a character, under '{key}'"
        raise BadDocumentError("half a character", where, message, "fix or remove the line") from None
    return value


def _look_up(record: dict[str, Any], key: str) -> tuple[bool, Any]:
    if key in record:
        return True, record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value


def _rows(chunk: Chunk, key: str) -> Iterator[tuple[str, str | BadDocumentError]]:
    import pyarrow

    number = chunk.first
    for batch in pyarrow.ipc.open_stream(chunk.data):
        column = batch.column(0)
        while pyarrow.types.is_struct(column.type):
            column = column.flatten()[0]  # a nested column is read without its siblings; a null above is a null
        for text in column.to_pylist():
            where = f"{chunk.file} row {number}"
            if text is None:
                message = f"has null in column '{key}', not a text"
                yield where, BadDocumentError("null", where, message, "remove the row")
            else:
                yield where, text
            number += 1


def _kind(value: Any) -> str:
    names = {
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")
