"""Tokenization of text files to a dataset: order, workers, and refused input."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.core.errors import DataError
from megascale.data import indexed_dataset, prepare
from megascale.data.prepare import PrepareRequest
from tests.data.test_tokenizer import byte_level, words

TEXTS = [f"document {number} " + "é" * (number % 7) for number in range(200)]


def lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_of(prefix: Path) -> list[str]:
    """The documents of a dataset of the byte tokenizer; every document must end in eod."""
    reader = indexed_dataset.open_dataset(prefix)
    documents = [reader[index].tolist() for index in range(len(reader))]
    assert all(ids[-1] == 256 and 256 not in ids[:-1] for ids in documents)
    return [bytes(ids[:-1]).decode() for ids in documents]


def make(inputs: list[Path], output: Path, **options: Any) -> indexed_dataset.DatasetInfo:
    return prepare.prepare_dataset(PrepareRequest(inputs, output, **({"tokenizer": "bytes"} | options)))


def digests(prefix: Path) -> list[str]:
    files = [prefix.with_name(prefix.name + ending) for ending in (".bin", ".idx", ".json")]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def test_inputs_are_concatenated_without_empty_documents(tmp_path: Path) -> None:
    whole, empty = tmp_path / "whole.txt", tmp_path / "empty.txt"
    whole.write_text("all of it\nas one\n")
    empty.touch()
    first, second = lines(tmp_path / "b.jsonl", ["one", "", "two"]), lines(tmp_path / "a.jsonl", ["", "three"])
    read: list[int] = []
    request = PrepareRequest([first, whole, empty, second, first], tmp_path / "made" / "here" / "set", "bytes")
    made = prepare.prepare_dataset(request, read.append)
    expected = ["one", "two", "all of it\nas one\n", "three", "one", "two"]
    assert texts_of(request.output) == expected
    assert made.documents == len(expected)
    assert made.tokens == sum(len(text) + 1 for text in expected)
    assert sum(read) == sum(path.stat().st_size for path in request.inputs)


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_any_number_of_workers_writes_the_same_files(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "BATCH_CHARACTERS", 100)  # dozens of batches
    tokenizer = tmp_path / "tokenizer.json"
    byte_level("<eod>").save(str(tokenizer))
    source = lines(tmp_path / "input.jsonl", TEXTS)
    name = "bytes" if kind == "bytes" else str(tokenizer)
    for workers in (1, 3):
        make([source], tmp_path / f"by{workers}", tokenizer=name, workers=workers)
    assert digests(tmp_path / "by1") == digests(tmp_path / "by3")
    if kind == "bytes":
        assert texts_of(tmp_path / "by3") == TEXTS


def test_documents_begin_with_bos_if_asked(tmp_path: Path) -> None:
    tokenizer, source = tmp_path / "tokenizer.json", lines(tmp_path / "input.jsonl", TEXTS)
    byte_level("<eod>", "<bos>").save(str(tokenizer))
    for workers in (1, 2):
        made = make([source], tmp_path / f"by{workers}", tokenizer=str(tokenizer), add_bos=True, workers=workers)
        reader = indexed_dataset.open_dataset(tmp_path / f"by{workers}")
        assert all(reader[index][[0, -1]].tolist() == [257, 256] for index in range(len(reader)))
        assert made.tokenizer.bos == 257 and reader.info == made
    with pytest.raises(DataError, match="bytes does not say which token begins a text  -> leave out --add-bos"):
        make([source], tmp_path / "none", add_bos=True)


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    words({f"w{number}": number for number in range(70_000)} | {"[UNK]": 70_000, "<eod>": 70_001}).save(str(tokenizer))
    made = make(
        [lines(tmp_path / "in.jsonl", ["w5 w69999 other"])], tmp_path / "set", tokenizer=str(tokenizer), eod="<eod>"
    )
    reader = indexed_dataset.open_dataset(tmp_path / "set")
    assert reader.tokens.dtype == np.int32
    assert reader[0].tolist() == [5, 69_999, 70_000, 70_001]
    assert made.vocab_size == 70_002


def test_a_huge_document(tmp_path: Path) -> None:
    size = 8 << 20
    (tmp_path / "huge.txt").write_bytes(b"0123456789abcdef" * (size // 16))
    made = make([tmp_path / "huge.txt"], tmp_path / "set", workers=2)
    reader = indexed_dataset.open_dataset(tmp_path / "set")
    assert made.tokens == size + 1
    assert bytes(reader[0][-17:-1].astype(np.uint8)) == b"0123456789abcdef"


def test_a_dead_worker_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "BATCH_CHARACTERS", 100)
    read: list[int] = []

    def progress(size: int) -> None:
        read.append(size)
        if len(read) == 50:
            for worker in multiprocessing.active_children():
                assert worker.pid
                os.kill(worker.pid, signal.SIGKILL)

    request = PrepareRequest([lines(tmp_path / "in.jsonl", TEXTS)], tmp_path / "out" / "set", "bytes", workers=2)
    with pytest.raises(DataError, match=r"a worker process died.*  -> fewer --workers"):
        prepare.prepare_dataset(request, progress)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_leaves_nothing(tmp_path: Path, workers: int) -> None:
    source = lines(tmp_path / "in.jsonl", TEXTS)
    source.write_text(source.read_text() + "{}\n")
    with pytest.raises(DataError, match=r"in.jsonl:201 has no field 'text'"):
        make([source], tmp_path / "out" / "set", workers=workers)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("clash", ["set.json", "set.bin", "tokenizer"])
def test_an_input_is_not_overwritten(tmp_path: Path, clash: str) -> None:
    source, output, options = lines(tmp_path / "in.jsonl", ["text"]), tmp_path / "set", {}
    if clash == "tokenizer":
        byte_level("<eod>").save(str(tmp_path / "set.json"))
        options["tokenizer"] = str(tmp_path / "set.json")
        clash = "set.json"
    else:
        source = source.rename(tmp_path / clash)
        output = tmp_path / "elsewhere" / ".." / "set"
    before = (tmp_path / clash).read_bytes()
    with pytest.raises(DataError, match=f"{clash} would be overwritten, but it is read  -> another --output"):
        make([source], output, **options)
    assert (tmp_path / clash).read_bytes() == before


def test_only_empty_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the input has no text  -> check the files and --key"):
        make([lines(tmp_path / "in.jsonl", ["", ""])], tmp_path / "set")
