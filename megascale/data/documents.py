"""Documents of text files: a JSON object per line, or a whole file as a single document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megascale.core.errors import DataError
from megascale.core.limits import os_error_hint

JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Suffixes of files with a JSON object per line; `.json` too, as megatron-core's users name such files."""


def read_documents(path: Path, key: str) -> Iterator[tuple[str, int]]:
    """Yield (text, bytes of input) for every document of a file. `key`: the JSON field that holds the text.

    Raises: DataError, naming file and line, for input that is unreadable or not text.
    """
    try:
        yield from _json_lines(path, key) if path.suffix.lower() in JSON_LINES else _plain_text(path)
    except OSError as error:
        hint = os_error_hint(error, "give text or .jsonl files")
        raise DataError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from None


def _plain_text(path: Path) -> Iterator[tuple[str, int]]:
    raw = path.read_bytes()
    try:
        yield raw.decode("utf-8").removeprefix("\ufeff"), len(raw)
    except UnicodeDecodeError as error:
        hint = "give plain text in UTF-8, not compressed"
        raise DataError(f"{path}: byte {error.start} ({raw[error.start]:#04x}) is not UTF-8", hint=hint) from None


def _json_lines(path: Path, key: str) -> Iterator[tuple[str, int]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _text(line, key, f"{path}:{number}"), len(line)


def _text(line: bytes, key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # a line that is not UTF-8 raises ValueError too
        raise DataError(f"{where} is not a line of JSON: {error}", hint="fix or remove the line") from None
    if not isinstance(record, dict):
        raise DataError(f"{where} is {_kind(record)}, not an object with a text", hint='{"text": "..."} on each line')
    if key not in record:
        keys = ", ".join(list(record)[:8]) + (", ..." if len(record) > 8 else "")
        raise DataError(f"{where} has no field '{key}': its fields are {keys or 'none'}", hint="--key FIELD")
    text = record[key]
    if not isinstance(text, str):
        raise DataError(f"{where} has {_kind(text)} under '{key}', not a text", hint="--key FIELD, or fix the line")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(text[error.start]):04x}"
        what = f"{where} has {surrogate}, half a character, under '{key}'"
        raise DataError(what, hint="fix or remove the line") from None
    return text


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
