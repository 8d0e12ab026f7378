"""Corpus of the quickstart: reproducible, with disjoint parts and a lossless tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale.core.errors import DataError
from megascale.data.prepare.python_corpus import HELD_OUT, make_corpus, modules
from megascale.data.prepare.special_tokens import USUAL_NAMES
from megascale.data.prepare.tokenizer import FileTokenizer

TOOL = Path(__file__).parents[3] / "tools" / "corpus.py"
FILES = ("train.jsonl", "valid.jsonl", "tokenizer.json")


def documents(path: Path) -> dict[str, str]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {record["name"]: record["text"] for record in records}
    assert len(found) == len(records)
    return found


def run(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), "--output", str(output), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the corpus of this Python with a small vocabulary."""
    output = tmp_path_factory.mktemp("corpus") / "made" / "here"
    done = run(output, "--vocab-size", "400")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{output}: ")
    assert done.stdout.endswith("vocabulary 400\n")
    return output


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Write a small library: 45 modules and some files to leave out."""
    root = tmp_path / "library"
    for number in range(45):
        path = root / f"package{number % 3}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def function{number}():\n    return {number}\n")
    for name in ("test/a.py", "package0/tests/b.py", "site-packages/c.py", "package1/__init__.py", "package1/d.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name.endswith("__init__.py") else f"left_out = '{name}'\n")
    (root / "package2" / "copy.py").write_text("def function0():\n    return 0\n")
    (root / "package2" / "latin.py").write_bytes(b"name = '\xe9'\n")
    return root


@pytest.mark.slow
def test_it_is_the_same_each_time(corpus: Path, tmp_path: Path) -> None:
    assert run(tmp_path, "--vocab-size", "400").returncode == 0
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (corpus / name).read_bytes()


def test_held_out_modules_are_not_trained_on(corpus: Path) -> None:
    train, valid = documents(corpus / "train.jsonl"), documents(corpus / "valid.jsonl")
    assert not set(train) & set(valid)
    assert not set(train.values()) & set(valid.values())
    assert abs(len(valid) - (len(train) + len(valid)) / HELD_OUT) <= 1
    assert len(train) > 100
    assert train["json/decoder.py"] == (Path(json.__file__).parent / "decoder.py").read_text()


def test_modules_of_a_library(library: Path) -> None:
    found = dict(modules(library))
    assert list(found) == sorted(found)
    assert len(found) == 46
    assert found["package2/latin.py"] == "name = '\N{REPLACEMENT CHARACTER}'\n"
    assert not any("left_out" in text for text in found.values())
    assert len(set(found.values())) == len(found)


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_tokenizer_round_trips_any_text(corpus: Path, text: str) -> None:
    tokenizer = tokenizer_of(corpus)
    assert tokenizer.decode(tokenizer.encode([text])[0].tolist()) == text


def tokenizer_of(folder: Path) -> FileTokenizer:
    return FileTokenizer(folder / "tokenizer.json")


def test_the_tokenizer_ends_documents(corpus: Path) -> None:
    tokenizer = tokenizer_of(corpus)
    assert tokenizer.vocab_size == 400
    assert tokenizer.decode([tokenizer.eod]) == USUAL_NAMES["eos"][0]
    source = documents(corpus / "valid.jsonl")
    encoded = tokenizer.encode(list(source.values()))
    assert not any((ids == tokenizer.eod).any() for ids in encoded)
    assert sum(map(len, encoded)) < 0.8 * sum(len(text.encode()) for text in source.values())


@pytest.mark.parametrize("size", [256, 0])
def test_a_vocabulary_too_small_for_bytes_is_refused(library: Path, tmp_path: Path, size: int) -> None:
    with pytest.raises(DataError, match=f"a vocabulary of {size} is too small for all bytes  -> give --vocab-size 257"):
        make_corpus(library, tmp_path / "out", size)
    assert not (tmp_path / "out").exists()


def test_the_smallest_vocabulary(library: Path, tmp_path: Path) -> None:
    make_corpus(library, tmp_path / "out", 257)
    tokenizer = tokenizer_of(tmp_path / "out")
    assert tokenizer.decode(tokenizer.encode(["é\0"])[0].tolist()) == "é\0"


def test_a_python_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds 0 modules as source  -> use a Python with its library"):
        make_corpus(tmp_path, tmp_path / "out", 300)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    done = run(tmp_path / "taken" / "corpus")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"{tmp_path / 'taken' / 'corpus'}: Not a directory  -> give another --output\n"
