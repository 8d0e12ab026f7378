"""Tokenizers: round trips, the end-of-document token, and unusable files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from megascale.core.errors import DataError
from megascale.data.prepare.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def byte_level(*specials: str) -> Tokenizer:
    """A byte-level BPE tokenizer with special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token) for token in specials])
    return tokenizer


def words(vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokenizer.json"


@given(st.lists(TEXTS))
def test_bytes_round_trip(texts: list[str]) -> None:
    tokenizer = load_tokenizer("bytes")
    encoded = tokenizer.encode(texts)
    assert [ids.tolist() for ids in encoded] == [list(text.encode()) for text in texts]
    assert [tokenizer.decode([*ids.tolist(), tokenizer.eod]) for ids in encoded] == texts
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.eod == tokenizer.vocab_size - 1 == 256


@given(st.lists(TEXTS))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_round_trips(path: Path, texts: list[str]) -> None:
    byte_level("<eod>").save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert [tokenizer.decode(ids.tolist()) for ids in tokenizer.encode(texts)] == texts


def test_an_end_of_document_that_is_given_is_used(path: Path) -> None:
    byte_level("</s>", "<|endoftext|>").save(str(path))
    assert load_tokenizer(str(path), "</s>").eod == 256
    assert load_tokenizer(str(path), 7).eod == 7
    with pytest.raises(DataError, match=r"tokenizer.json has no token <stop> to end documents with  -> --eod TOKEN"):
        load_tokenizer(str(path), "<stop>")


def test_documents_are_neither_cut_nor_padded_nor_framed(path: Path) -> None:
    made = byte_level("<eod>", "<bos>", "<pad>")
    made.enable_truncation(4)
    made.enable_padding(length=8, pad_token="<pad>", pad_id=258)
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 257)])
    made.save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert [len(ids) for ids in tokenizer.encode(["abcdefghij", "a"])] == [10, 1]


def test_ids_with_gaps_count_in_the_vocabulary(path: Path) -> None:
    words({"a": 0, "[UNK]": 9, "<eod>": 70_000}).save(str(path))
    tokenizer = load_tokenizer(str(path), "<eod>")
    assert tokenizer.vocab_size == 70_001
    assert [ids.tolist() for ids in tokenizer.encode(["a b"])] == [[0, 9]]


def test_a_text_that_the_vocabulary_cannot_express_is_refused(path: Path) -> None:
    words({"a": 0, "<eod>": 1}).save(str(path))
    with pytest.raises(DataError, match=r"tokenizer.json cannot tokenize: WordLevel error: Missing"):
        load_tokenizer(str(path), "<eod>").encode(["a b"])


def test_the_fingerprint_is_of_the_file(path: Path, tmp_path: Path) -> None:
    byte_level("<eod>").save(str(path))
    other, copy = tmp_path / "other.json", tmp_path / "copy.json"
    byte_level("<eos>").save(str(other))
    copy.write_bytes(path.read_bytes())
    prints = [FileTokenizer(file).fingerprint for file in (path, copy, other)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("content", ["", "garbage", "{}", "[1]", json.dumps({"model": {"type": "BPE"}}), "\udcff"])
def test_garbage_is_refused(path: Path, content: str) -> None:
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(DataError, match=r"tokenizer.json is not a tokenizer: .* or bytes"):
        load_tokenizer(str(path))


@pytest.mark.parametrize("name", ["bytes", "file"])
def test_ids_that_are_no_tokens_are_dropped(name: str, tmp_path: Path) -> None:
    """Such as those of a damaged dataset, or of another tool."""
    byte_level("<eod>").save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer("bytes" if name == "bytes" else str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(["two"])[0].tolist()
    assert tokenizer.decode([-1, *ids, -(2**62), 2**31, 2**33]) == "two"


@pytest.mark.parametrize("name", ["nowhere.json", "."])
def test_a_missing_file_is_refused(name: str) -> None:
    why = rf"{name} is not a regular file" if name == "." else rf"there is no file {name}"
    with pytest.raises(DataError, match=rf"{why}  -> a tokenizer.json, or bytes"):
        load_tokenizer(name)


def test_the_tokenizer_in_a_folder_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(DataError, match=rf"is not a regular file  -> did you mean {tmp_path}/tokenizer.json\?"):
        load_tokenizer(str(tmp_path))


def test_the_end_of_document_of_bytes_is_fixed() -> None:
    with pytest.raises(DataError, match="the tokenizer bytes has a fixed end-of-document token  -> leave out --eod"):
        load_tokenizer("bytes", "<eod>")
