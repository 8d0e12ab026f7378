"""Documents out of text files: a line of JSON each, or a file as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megascale.core.errors import DataError

JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Endings of files with a JSON object in each line; `.json` too, as megatron-core's users name them."""


def documents(path: Path, key: str) -> Iterator[tuple[str, int]]:
    """The text of each document of a file, with the bytes of input that it took. `key`: the field of a JSON line.

    Raises: DataError, naming file and line, for what cannot be read or is not text.
    """
    try:
        yield from _json_lines(path, key) if path.suffix.lower() in JSON_LINES else _whole(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}", mend="give text or .jsonl files") from None


def _whole(path: Path) -> Iterator[tuple[str, int]]:
    raw = path.read_bytes()
    try:
        yield raw.decode("utf-8").removeprefix("\ufeff"), len(raw)
    except UnicodeDecodeError as error:
        mend = "give plain text in UTF-8, not compressed"
        raise DataError(f"{path}: byte {error.start} ({raw[error.start]:#04x}) is not UTF-8", mend=mend) from None


def _json_lines(path: Path, key: str) -> Iterator[tuple[str, int]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _text(line, key, f"{path}:{number}"), len(line)


def _text(line: bytes, key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # a ValueError also if it is not UTF-8
        raise DataError(f"{where} is not a line of JSON: {error}", mend="mend or remove the line") from None
    if not isinstance(record, dict):
        raise DataError(f"{where} is {_kind(record)}, not an object with a text", mend='{"text": "..."} on each line')
    if key not in record:
        keys = ", ".join(list(record)[:8]) + (", ..." if len(record) > 8 else "")
        raise DataError(f"{where} has no field '{key}': its fields are {keys or 'none'}", mend="--key FIELD")
    text = record[key]
    if not isinstance(text, str):
        raise DataError(f"{where} has {_kind(text)} under '{key}', not a text", mend="--key FIELD, or mend the line")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise DataError(
            f"{where} has {half}, half a character, under '{key}'", mend="mend or remove the line"
        ) from None
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
