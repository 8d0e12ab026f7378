"""Tokenization of text files to a dataset: order, workers, and refused input."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.core.errors import DataError
from megascale.data.prepare import dataset_writer, documents, preparation
from megascale.data.prepare.preparation import Prepared, PrepareRequest
from megascale.data.read import indexed_dataset
from tests.data.prepare.test_tokenizer import byte_level, words

TEXTS = [f"document {number} " + "é" * (number % 7) for number in range(200)]


def lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of chunks and tasks."""
    for module in (documents, preparation):
        monkeypatch.setattr(module, "CHUNK_BYTES", 100)


def texts_of(prefix: Path) -> list[str]:
    """The documents of a dataset of the byte tokenizer; every document must end in eod."""
    reader = indexed_dataset.open_dataset(prefix)
    documents = [reader[index].tolist() for index in range(len(reader))]
    assert all(ids[-1] == 256 and 256 not in ids[:-1] for ids in documents)
    return [bytes(ids[:-1]).decode() for ids in documents]


def run(inputs: list[Path], output: Path, **options: Any) -> Prepared:
    names = [str(path) for path in inputs]
    return preparation.prepare_dataset(PrepareRequest(names, output, **({"tokenizer": "bytes"} | options)))


def make(inputs: list[Path], output: Path, **options: Any) -> indexed_dataset.DatasetInfo:
    return run(inputs, output, **options).dataset


def digests(prefix: Path) -> list[str]:
    files = [prefix.with_name(prefix.name + ending) for ending in (".bin", ".idx", ".json")]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def test_inputs_are_concatenated_without_empty_documents(tmp_path: Path) -> None:
    whole, empty = tmp_path / "whole.txt", tmp_path / "empty.txt"
    whole.write_text("all of it\nas one\n")
    empty.touch()
    first, second = lines(tmp_path / "b.jsonl", ["one", "", "two"]), lines(tmp_path / "a.jsonl", ["", "three"])
    read: list[tuple[int, int]] = []
    inputs, output = [first, whole, empty, second, first], tmp_path / "made" / "here" / "set"
    request = PrepareRequest([str(path) for path in inputs], output, "bytes")
    made = preparation.prepare_dataset(request, lambda done, total: read.append((done, total)))
    expected = ["one", "two", "all of it\nas one\n", "three", "one", "two"]
    assert texts_of(output) == expected
    assert made.dataset.documents == len(expected)
    assert made.dataset.tokens == sum(len(text) + 1 for text in expected)
    size = sum(path.stat().st_size for path in inputs)
    assert read[-1] == (size, size) and (made.bytes, made.files) == (size, 5)
    assert made.skipped == {"empty": (4, f"{first}:2")}


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_any_number_of_workers_writes_the_same_files(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
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
    small_chunks(monkeypatch)
    read: list[int] = []

    def progress(done: int, total: int) -> None:
        read.append(done)
        if len(read) == 20:
            for worker in multiprocessing.active_children():
                assert worker.pid
                os.kill(worker.pid, signal.SIGKILL)

    source, output = lines(tmp_path / "in.jsonl", TEXTS), tmp_path / "out" / "set"
    with pytest.raises(DataError, match=r"a worker process died.*  -> the same command continues"):
        preparation.prepare_dataset(PrepareRequest([str(source)], output, "bytes", workers=2), progress)
    continued = run([source], output)
    assert continued.continued_after > 0 and texts_of(output) == TEXTS
    assert sorted(path.name for path in output.parent.iterdir()) == ["set.bin", "set.idx", "set.json"]


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


def skipping(tmp_path: Path, workers: int) -> Prepared:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": 5}\nnot JSON\n[]\n\n{"body": "x"}\n{"text": ""}\n')
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / "c.jsonl").write_text('also no JSON\n{"text": "two"}\n')
    paths = [tmp_path / name for name in ("a.jsonl", "b.txt", "c.jsonl")]
    return run(paths, tmp_path / "set", skip_bad=True, workers=workers)


def test_what_is_no_text_is_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    made = skipping(tmp_path, 2)
    assert texts_of(tmp_path / "set") == ["one", "two"]
    a = tmp_path / "a.jsonl"
    assert {reason: count for reason, (count, _) in made.skipped.items()} == {
        "not a text": 1, "not JSON": 2, "not an object": 1, "no field 'text'": 1, "empty": 1, "not UTF-8": 1,
    }  # fmt: skip
    assert made.skipped["not JSON"][1].startswith(f"{a}:3 is not a line of JSON: Expecting value")
    assert (
        made.skipped["not a text"][1] == f"{a}:2 has a number under 'text', not a text  -> --key FIELD, or fix the line"
    )
    assert made.skipped["empty"] == (1, f"{a}:7")
    assert made == skipping(tmp_path, 1)


# Deaths in the middle.

SOURCES = ("in.jsonl", "long.txt", "more.jsonl")


def sources(folder: Path) -> list[Path]:
    """Lines, a text of many pieces, and lines again."""
    lines(folder / "in.jsonl", TEXTS[:60])
    (folder / "long.txt").write_text("".join(f"line {number}\n" for number in range(300)))
    lines(folder / "more.jsonl", ["", *TEXTS[60:]])
    return [folder / name for name in SOURCES]


def killed_in(prepare_and_die: Callable[[], object]) -> None:
    """Call a function in a child process, which it is to kill."""
    child = os.fork()
    if child == 0:
        try:
            prepare_and_die()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def die_after(inputs: list[Path], output: Path, saves: int, appends: int) -> None:
    """Prepare in a child process that is killed at its n-th append after that many records of the progress."""
    counts = {"save": 0, "append": 0}
    save, append = preparation.Preparation.save, dataset_writer.DatasetWriter.append

    def saving(self: Any) -> None:
        save(self)
        counts["save"] += 1

    def dying(self: Any, *arguments: Any) -> None:
        append(self, *arguments)
        counts["append"] += counts["save"] >= saves
        if counts["append"] > appends:
            self._bin.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def prepare_and_die() -> None:
        preparation.Preparation.save, dataset_writer.DatasetWriter.append = saving, dying
        run(inputs, output)

    killed_in(prepare_and_die)


@pytest.mark.parametrize(("saves", "appends"), [(0, 0), (1, 0), (3, 2), (20, 0), (40, 5)])
def test_a_killed_preparation_continues_to_the_same_bytes(
    saves: int, appends: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    monkeypatch.setattr(documents, "PIECE_BYTES", 128)
    monkeypatch.setattr(preparation, "SAVE_EVERY_S", 0.0 if saves else 1000.0)
    inputs, output, said = sources(tmp_path), tmp_path / "out" / "set", list[str]()
    undisturbed = run(inputs, tmp_path / "whole")
    die_after(inputs, output, saves, appends)
    die_after(inputs, output, 1, 1) if saves else None
    request = PrepareRequest([str(path) for path in inputs], output, "bytes", workers=1)
    made = preparation.prepare_dataset(request, say=said.append)
    assert digests(output) == digests(tmp_path / "whole")
    assert (made.dataset, made.skipped) == (undisturbed.dataset, undisturbed.skipped)
    assert sorted(path.name for path in output.parent.iterdir()) == ["set.bin", "set.idx", "set.json"]
    if saves:
        assert made.continued_after > 0
        assert said == [f"continues after {made.continued_after} documents of an unfinished preparation"]
    else:
        assert said == [], "nothing had been recorded"


def die_at_rename(inputs: list[Path], output: Path, renames: int) -> None:
    """Prepare in a child process that is killed after that many files of the dataset have their names."""
    replace, done = Path.replace, list[Path]()

    def dying(self: Path, target: Path) -> Path:
        if self.suffix == ".part":
            done.append(target)
        if len(done) > renames:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)

    def prepare_and_die() -> None:
        Path.replace = dying  # type: ignore[method-assign]
        run(inputs, output)

    killed_in(prepare_and_die)


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_preparation_killed_while_it_gives_names_continues(
    renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    monkeypatch.setattr(preparation, "SAVE_EVERY_S", 0.0)
    inputs, output = sources(tmp_path), tmp_path / "out" / "set"
    run(inputs, tmp_path / "whole")
    run(inputs[:1], output)  # an older dataset
    die_at_rename(inputs, output, renames)
    with pytest.raises(DataError, match="there is no file"):
        indexed_dataset.open_dataset(output)
    assert run(inputs, output).continued_after == len(TEXTS) + 1
    assert digests(output) == digests(tmp_path / "whole")
    assert sorted(path.name for path in output.parent.iterdir()) == ["set.bin", "set.idx", "set.json"]


@pytest.mark.parametrize("gone", [".set.bin.part", ".set.lengths.part"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_preparation_whose_files_are_gone_starts_anew(
    gone: str, cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    monkeypatch.setattr(preparation, "SAVE_EVERY_S", 0.0)
    inputs, output, said = sources(tmp_path), tmp_path / "out" / "set", list[str]()
    run(inputs, tmp_path / "whole")
    die_at_rename(inputs, output, 0)
    os.truncate(output.parent / gone, 10) if cut else (output.parent / gone).unlink()
    request = PrepareRequest([str(path) for path in inputs], output, "bytes")
    assert preparation.prepare_dataset(request, say=said.append).continued_after == 0
    assert said == [f"starts anew: files of the unfinished preparation of {output} are gone or cut"]
    assert digests(output) == digests(tmp_path / "whole")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_late_does_not_throw_the_work_away(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    source, output, said = lines(tmp_path / "in.jsonl", TEXTS), tmp_path / "set", list[str]()
    source.write_bytes(source.read_bytes() + b'{"text": "\xff"}\n' + source.read_bytes())
    with pytest.raises(DataError, match=r"in.jsonl:201 is not UTF-8: .*, or the same command with --skip-bad"):
        run([source], output, workers=workers)
    made = preparation.prepare_dataset(PrepareRequest([str(source)], output, "bytes", skip_bad=True), say=said.append)
    assert made.continued_after > 100 and said[0].startswith("continues after ")
    fresh = run([source], tmp_path / "fresh", skip_bad=True)
    assert digests(output) == digests(tmp_path / "fresh") and made.skipped == fresh.skipped
    assert list(made.skipped) == ["not UTF-8"]
    preparation.prepare_dataset(PrepareRequest([str(source)], output, "bytes", skip_bad=True), say=said.append)
    assert said[1:] == [f"{output}.idx and the other files of the dataset are replaced at the end"]


@pytest.mark.parametrize(
    ("before", "change", "named"),
    [
        ({}, {"add_bos": True}, "tokenizer"),
        ({}, {"key": "body"}, "--key"),
        ({"skip_bad": True}, {"skip_bad": False}, "--skip-bad"),
        ({}, {"skip_bad": True, "key": "body"}, "--key, --skip-bad"),
        ({}, {}, "inputs"),
    ],
)
def test_other_arguments_and_inputs_start_anew(
    before: dict[str, Any], change: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    monkeypatch.setattr(preparation, "SAVE_EVERY_S", 0.0)
    tokenizer, said = tmp_path / "tokenizer.json", list[str]()
    byte_level("<eod>", "<bos>").save(str(tokenizer))
    records = [json.dumps({"text": text, "body": text[::-1]}) for text in TEXTS]
    source, output = tmp_path / "in.jsonl", tmp_path / "set"
    source.write_text("\n".join(records))
    options = {"tokenizer": str(tokenizer), "workers": 1}
    with monkeypatch.context() as patch:
        patch.setattr(dataset_writer.DatasetWriter, "commit", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run([source], output, **(options | before))
    assert preparation.progress_file(output).exists()
    if not change:
        source.write_text("\n".join(records[:50]))
    request = PrepareRequest([str(source)], output, **(options | change))
    made = preparation.prepare_dataset(request, say=said.append)
    assert said == [f"starts anew: an unfinished preparation of {output} had other {named}"]
    assert made.continued_after == 0
    run([source], tmp_path / "fresh", **(options | change))
    assert digests(output) == digests(tmp_path / "fresh")


def test_two_processes_do_not_write_the_same_dataset(tmp_path: Path) -> None:
    source = lines(tmp_path / "in.jsonl", TEXTS)
    with (
        dataset_writer.DatasetWriter(tmp_path / "set", np.uint16),
        pytest.raises(DataError, match=r"another process writes \S+/set  -> wait for it"),
    ):
        run([source], tmp_path / "set")
    assert run([source], tmp_path / "set").dataset.documents == len(TEXTS)


def test_a_long_text_is_tokenized_in_pieces_by_any_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 200)
    text = "".join(f"line {number} é\n" for number in range(500))
    (tmp_path / "long.txt").write_text(text)
    lines(tmp_path / "long.jsonl", [text, "short", text])
    for workers in (1, 2):
        run([tmp_path / "long.txt", tmp_path / "long.jsonl"], tmp_path / f"by{workers}", workers=workers)
    assert texts_of(tmp_path / "by1") == [text, text, "short", text]
    assert digests(tmp_path / "by1") == digests(tmp_path / "by2")
