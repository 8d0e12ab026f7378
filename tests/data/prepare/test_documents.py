"""Documents of text files are read; bad input is refused with its file and line."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.core.errors import DataError
from megascale.data.prepare.documents import BadDocumentError, read_chunks, read_documents
from megascale.data.prepare.inputs import JSON_LINES, InputFile


def texts_of(path: Path, key: str) -> list[str]:
    """The texts of a file; raises the first error."""
    found = []
    for chunk in read_chunks(InputFile(str(path), path.stat().st_size, ""), key):
        for _, text in read_documents(chunk, key):
            if not isinstance(text, str):
                raise text
            found.append(text)
    return found


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(TEXTS), st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n \n"]), st.sampled_from(JSON_LINES))
def test_lines_of_json(texts: list[str], ascii_only: bool, separator: str, ending: str) -> None:
    lines = [json.dumps({"id": 1, "body": text}, ensure_ascii=ascii_only) for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"input{ending}"
        path.write_bytes(separator.join(lines).encode())
        assert texts_of(path, "body") == texts


@pytest.mark.parametrize("name", ["input.txt", "input.jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    text = '{"text": "a"}' if name.endswith("jsonl") else "a"
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert texts_of(tmp_path / name, "text") == ["a"]


REFUSED = {
    b'{"text": "a"}\n{"text": "b': r"input.jsonl:2 is not a line of JSON: Unterminated string",
    b'\n\n{"text": "\xff"}': r"input.jsonl:3 is not UTF-8: 'utf-8' codec can't decode byte 0xff",
    b"[" * 100_000: r"input.jsonl:1 is not a line of JSON: maximum recursion depth",
    b"1" * 5_000: r"input.jsonl:1 is not a line of JSON: Exceeds the limit",
    b'["text"]': r"input.jsonl:1 is a list, not an object with a text  -> .* `jq -c '.\[\]'` writes a JSON array so",
    b'[\n{"text": "a"}\n]': r"input.jsonl:1 is not a line of JSON: .*  -> .* `jq -c",
    b'"text"': r"input.jsonl:1 is a text, not an object with a text",
    b"null": r"input.jsonl:1 is null, not an object",
    b"{}": r"input.jsonl:1 has no field 'text': its fields are none",
    b'{"body": "a", "id": 1}': r"input.jsonl:1 has no field 'text': its fields are body, id  -> --key",
    json.dumps(dict.fromkeys(map(str, range(99)))).encode(): r"its fields are 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.  ->",
    b'{"text": 5}': r"input.jsonl:1 has a number under 'text', not a text",
    b'{"text": true}': r"input.jsonl:1 has true or false under 'text', not a text",
    b'{"text": null}': r"input.jsonl:1 has null under 'text', not a text",
    b'{"text": {"text": "a"}}': r"input.jsonl:1 has an object under 'text', not a text",
    b'{"text": "a\\ud800b"}': r"input.jsonl:1 has \\ud800, half a character, under 'text'",
}


@pytest.mark.parametrize("raw", REFUSED)
def test_a_line_without_text_is_refused_with_its_number(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=REFUSED[raw]) as caught:
        texts_of(path, "text")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_utf8_is_refused_with_its_byte(tmp_path: Path) -> None:
    path = tmp_path / "input.xz"
    path.write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(DataError, match=r"input.xz is not UTF-8 at byte 1 of 3 \(0x8b\)  -> .*compressed as .gz"):
        texts_of(path, "text")


def test_a_nested_key(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_text('{"a": {"b": {"c": "deep"}}}\n{"a.b.c": "itself", "a": {"b": {"c": "no"}}}\n')
    assert texts_of(path, "a.b.c") == ["deep", "itself"]
    for text in ('{"a": {"b": "c"}}', '{"a": {}}', '{"b": 1}'):
        path.write_text(text)
        with pytest.raises(DataError, match=r"input.jsonl:1 has no field 'a.b.c'"):
            texts_of(path, "a.b.c")


def test_an_error_is_the_same_in_another_process() -> None:
    error = BadDocumentError("not JSON", "a.jsonl:3", "is no line", "fix it")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.reason, copy.where) == ("a.jsonl:3 is no line  -> fix it", "not JSON", "a.jsonl:3")
