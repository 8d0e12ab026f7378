"""Chunks have the documents of a file, whatever its format and sizes; bad input is refused with its file and line."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.core.errors import DataError
from megascale.data.prepare import documents
from megascale.data.prepare.documents import BadDocumentError, Chunk, read_chunks, read_documents, split_text
from megascale.data.prepare.inputs import JSON_LINES, InputFile, find_inputs


def texts_in(path: Path, key: str) -> list[str]:
    """The texts of a file; raises the first error."""
    found = []
    for chunk in read_chunks(InputFile(str(path), path.stat().st_size, ""), key):
        for _, text in read_documents(chunk, key):
            if not isinstance(text, str):
                raise text
            found.append(text)
    return found


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(ANY_TEXT), st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n \n"]), st.sampled_from(JSON_LINES))
def test_lines_of_json(texts: list[str], ascii_only: bool, separator: str, ending: str) -> None:
    lines = [json.dumps({"id": 1, "body": text}, ensure_ascii=ascii_only) for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"input{ending}"
        path.write_bytes(separator.join(lines).encode())
        assert texts_in(path, "body") == texts


@pytest.mark.parametrize("name", ["input.txt", "input.jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    text = '{"text": "a"}' if name.endswith("jsonl") else "a"
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert texts_in(tmp_path / name, "text") == ["a"]


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
        texts_in(path, "text")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_utf8_is_refused_with_its_byte(tmp_path: Path) -> None:
    path = tmp_path / "input.xz"
    path.write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(DataError, match=r"input.xz is not UTF-8 at byte 1 of 3 \(0x8b\)  -> .*compressed as .gz"):
        texts_in(path, "text")


def test_a_nested_key(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_text('{"a": {"b": {"c": "deep"}}}\n{"a.b.c": "itself", "a": {"b": {"c": "no"}}}\n')
    assert texts_in(path, "a.b.c") == ["deep", "itself"]
    for text in ('{"a": {"b": "c"}}', '{"a": {}}', '{"b": 1}'):
        path.write_text(text)
        with pytest.raises(DataError, match=r"input.jsonl:1 has no field 'a.b.c'"):
            texts_in(path, "a.b.c")


def test_an_error_is_the_same_in_another_process() -> None:
    error = BadDocumentError("not JSON", "a.jsonl:3", "is no line", "fix it")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.reason, copy.where) == ("a.jsonl:3 is no line  -> fix it", "not JSON", "a.jsonl:3")


TEXTS = [f"document {number}\n" + "é" * (number % 7) for number in range(300)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of chunks."""
    monkeypatch.setattr(documents, "CHUNK_BYTES", 500)
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)


def chunks_of(path: Path, column: str = "text") -> list[Chunk]:
    return list(read_chunks(InputFile(str(path), path.stat().st_size, ""), column))


def texts_of(found: list[Chunk]) -> Iterator[Any]:
    return (text for chunk in found for _, text in read_documents(chunk, "text"))


def zstd(data: bytes) -> bytes:
    """Compress in two frames, as tools do that compress in parallel."""
    half = len(data) // 2
    return b"".join(pyarrow.compress(part, codec="zstd", asbytes=True) for part in (data[:half], data[half:]))


def parquet(texts: list[str | None], **options: Any) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), file, **options)
    return file.getvalue()


FILES = {
    "lines.jsonl": LINES,
    "lines.ndjson.gz": gzip.compress(LINES[:1000]) + gzip.compress(LINES[1000:]),
    "lines.json.zst": zstd(LINES),
    "table.parquet": parquet(TEXTS, row_group_size=40),
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_documents_in_order(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    found = chunks_of(tmp_path / name)
    assert len(found) >= 5
    assert list(texts_of(found)) == TEXTS
    assert sum(chunk.size for chunk in found) == len(FILES[name])
    places = [chunk.first for chunk in found]
    assert places[0] == 1 and places == sorted(set(places))


def test_lines_are_numbered_across_chunks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n\n".join(LINES.splitlines()))
    last = [place for chunk in chunks_of(tmp_path / "a.jsonl") for place, _ in read_documents(chunk, "text")][-1]
    assert last == f"{tmp_path / 'a.jsonl'}:{2 * len(TEXTS) - 1}"


def test_a_line_longer_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["short", "x" * 5_000, "y" * 499, ""]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    assert list(texts_of(chunks_of(tmp_path / "a.jsonl"))) == texts
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 3_000)
    with pytest.raises(DataError, match=r"a\.jsonl:2 is longer than 3000 bytes"):
        chunks_of(tmp_path / "a.jsonl")


class Trickle(io.RawIOBase):
    """A stream of which each read returns fewer bytes than asked for, as of a network."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._data.read(min(size, 37))

    def tell(self) -> int:
        return self._data.tell()


@pytest.mark.parametrize("read", [documents._read_lines, documents._read_pieces])
def test_chunks_do_not_depend_on_the_reads_of_a_stream(read: Any) -> None:
    def cut(stream: IO[bytes]) -> list[bytes]:
        return [chunk.data for chunk in read("a", stream, stream)]

    assert cut(Trickle(LINES)) == cut(io.BytesIO(LINES))  # type: ignore[arg-type]


@given(st.text(st.sampled_from("ab é𝄞\n 　"), max_size=400))
def test_the_pieces_of_a_text_are_the_text(text: str) -> None:
    before, documents.PIECE_BYTES = documents.PIECE_BYTES, 16
    try:
        pieces = split_text(text)
        found = list(documents._read_pieces("a", io.BytesIO(text.encode()), io.BytesIO(text.encode())))
    finally:
        documents.PIECE_BYTES = before
    assert "".join(pieces) == text
    assert b"".join(chunk.data for chunk in found).decode() == text
    assert all(len(chunk.data) <= 16 and chunk.data.decode() is not None for chunk in found)
    assert [chunk.begins for chunk in found] == [True] + [False] * (len(found) - 1)
    assert [chunk.ends for chunk in found] == [False] * (len(found) - 1) + [True]


def test_a_text_is_cut_between_lines_if_it_can_be() -> None:
    text = "one two\nthree\n\n  four five\n six seven\neight nine ten eleven twelve thirteen fourteen\n" + "x" * 200
    pieces = split_text(text)
    assert pieces[0].endswith("six seven\n") and pieces[1].startswith("eight")
    assert "".join(pieces) == text


def test_tokens_of_pieces_are_those_of_the_whole_for_a_tokenizer_that_divides_at_lines() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "def f(x):\n    return x\n\n\nclass A:\n\tpass  \nvalue = 1\n" * 20
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=400, show_progress=False))
    pieces = split_text(text)
    assert len(pieces) > 10
    assert [i for piece in pieces for i in tokenizer.encode(piece).ids] == tokenizer.encode(text).ids


DAMAGED = {
    "a.jsonl.gz": (gzip.compress(LINES)[:-20], "is cut short"),
    "b.jsonl.gz": (LINES, "cannot be read: Not a gzipped file"),
    "c.jsonl.zst": (zstd(LINES)[:-20], "cannot be read: Truncated compressed stream"),
    "d.jsonl.zst": (LINES, "cannot be read: ZSTD decompress failed"),
    "e.parquet": (LINES, "is no .parquet file"),
    "f.parquet": (parquet(TEXTS)[:-50], "is no .parquet file"),
    "g.parquet.gz": (gzip.compress(parquet(TEXTS)), "has its own compression"),
    "h.jsonl.gz": (gzip.compress(LINES)[:40] + b"0123456789" + gzip.compress(LINES)[50:], "cannot be read: error"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_line(name: str, tmp_path: Path) -> None:
    data, message = DAMAGED[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=rf"{name}:? .*{message}") as caught:
        chunks_of(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_columns_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = {"meta": [{"body": "one", "n": 1}, None, {"body": None, "n": 2}], "n": [1, 2, 3], "a.b": ["x", "y", "z"]}
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    assert list(texts_of(chunks_of(path, "a.b"))) == ["x", "y", "z"]
    first, *nulls = texts_of(chunks_of(path, "meta.body"))
    assert first == "one" and [error.where for error in nulls] == [f"{path} row 2", f"{path} row 3"]
    for column, message in {
        "none": "has no column 'none': its columns are meta, n, a.b",
        "meta.none": "has no column 'meta.none'",
        "n.x": "has no column 'n.x'",
        "n": "has int64 in column 'n', not texts",
        "meta": "has struct<body: string, n: int64> in column 'meta', not texts",
    }.items():
        with pytest.raises(DataError, match=message):
            chunks_of(path, column)


def test_inputs_are_found_in_folders_and_by_patterns(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.txt.gz", "sub/c.parquet", "sub/picture.png", ".hidden.jsonl", "z.JSON.zst"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def names(*given: str) -> tuple[list[str], int]:
        files, ignored = find_inputs([str(tmp_path / name) for name in given])
        return [str(Path(file.name).relative_to(tmp_path)) for file in files], ignored

    assert names(".") == (["a.txt.gz", "b.jsonl", "sub/c.parquet", "z.JSON.zst"], 1)
    assert names("**/*.parquet", "b.jsonl") == (["sub/c.parquet", "b.jsonl"], 0)
    assert names("sub/picture.png") == (["sub/picture.png"], 0), "a file that is named is read whatever its suffix"
    (tmp_path / "[x].txt").touch()
    assert names("[x].txt") == (["[x].txt"], 0)
    (tmp_path / "empty").mkdir()
    for missing, message in {
        "*.csv": "matches no file",
        "empty": "has no file of .jsonl",
        "no": "does not exist",
    }.items():
        with pytest.raises(DataError, match=message):
            names(missing)


def test_inputs_are_found_by_urls() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    for name in ("b.jsonl", "a.jsonl.gz", "sub/c.txt", "d.png"):
        fs.pipe_file(f"/prepare-inputs/{name}", gzip.compress(LINES) if name.endswith("gz") else LINES)
    files, ignored = find_inputs(["memory://prepare-inputs"])
    assert [file.name.rpartition("prepare-inputs/")[2] for file in files] == ["a.jsonl.gz", "b.jsonl", "sub/c.txt"]
    assert ignored == 1
    assert list(texts_of(list(read_chunks(files[0], "text")))) == TEXTS
    [one], ignored = find_inputs(["memory://prepare-inputs/d.png"])
    assert (one.size, ignored) == (len(LINES), 0) and one.version
    [one], _ = find_inputs(["memory://prepare-inputs/*.jsonl"])
    assert one.name.endswith("b.jsonl")
    for url in ("memory://prepare-inputs/none", "memory://nowhere/*.txt", "nosuch://a/b"):
        with pytest.raises(DataError, match="cannot be read"):
            find_inputs([url])
