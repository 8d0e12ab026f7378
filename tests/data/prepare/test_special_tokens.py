"""The token that ends a document is read from what files say; a name alone decides nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from megascale.cli.main import main
from megascale.core.errors import DataError
from megascale.data.prepare.tokenizer import FileTokenizer, load_tokenizer
from megascale.data.read import indexed_dataset
from tests.data.prepare.test_tokenizer import byte_level

SPECIALS = ("<pad>", "<eos>", "<bos>", "<|im_end|>")
IDS = {name: 256 + index for index, name in enumerate((*SPECIALS, "<s>", "</s>"))}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A tokenizer in Gemma's shape, where `<s>` and `</s>` are ordinary tokens."""
    made = byte_level(*SPECIALS)
    made.add_tokens([AddedToken("<s>"), AddedToken("</s>")])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def say(path: Path, **files: Any) -> None:
    """Write JSON files beside a tokenizer."""
    for name, value in files.items():
        (path.parent / f"{name}.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("files", "token", "origin"),
    [
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, "<|im_end|>", "eos_token of tokenizer_config.json"),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}}, "<|im_end|>", "tokenizer_config.json"),
        ({"tokenizer_config": {"eos_token": "</s>"}}, "</s>", "eos_token of tokenizer_config.json"),
        ({"tokenizer_config": {"eos_token": None}}, "<eos>", "special token of a usual name"),
        ({"special_tokens_map": {"eos_token": "<|im_end|>"}}, "<|im_end|>", "eos_token of special_tokens_map.json"),
        (
            {"special_tokens_map": {"eos_token": "<eos>"}, "tokenizer_config": {"eos_token": "<|im_end|>"}},
            "<|im_end|>",
            "tokenizer_config.json",
        ),
        ({"generation_config": {"eos_token_id": 259}}, "<|im_end|>", "eos_token_id of generation_config.json"),
        ({"generation_config": {"eos_token_id": [259]}}, "<|im_end|>", "eos_token_id of generation_config.json"),
        ({"generation_config": {"eos_token_id": [257, 259]}}, "<eos>", "special token of a usual name"),
        ({"config": {"eos_token_id": 259}}, "<|im_end|>", "eos_token_id of config.json"),
        ({"config": {"text_config": {"eos_token_id": 259}}}, "<|im_end|>", "eos_token_id of config.json"),
        ({"config": {"eos_token_id": 261}}, "<eos>", "special token of a usual name"),  # an ordinary token
        ({"config": {"eos_token_id": 3}, "tokenizer_config": {"eos_token": "<eos>"}}, "<eos>", "tokenizer_config.json"),
        ({}, "<eos>", "the one special token of a usual name in tokenizer.json"),
    ],
    ids=str,
)
def test_what_files_say_decides(path: Path, files: dict[str, Any], token: str, origin: str) -> None:
    say(path, **files)
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.eod == IDS[token] and origin in tokenizer.eod_origin
    assert load_tokenizer(str(path), "<pad>").eod == IDS["<pad>"]


@pytest.mark.parametrize("specials", [("<pad>",), ("</s>", "<|endoftext|>")])
def test_where_nothing_decides_the_user_is_asked(path: Path, specials: tuple[str, ...]) -> None:
    byte_level(*specials).save(str(path))
    words = f"does not say which token ends a document, .* are {', '.join(specials)}  -> --eod".replace("|", r"\|")
    with pytest.raises(DataError, match=words):
        load_tokenizer(str(path))


def test_an_ordinary_token_of_a_usual_name_ends_nothing(path: Path) -> None:
    made = byte_level("<pad>")
    made.add_tokens([AddedToken("</s>")])
    made.save(str(path))
    with pytest.raises(DataError, match="its special tokens are <pad>"):
        load_tokenizer(str(path))
    assert load_tokenizer(str(path), "</s>").eod == 257


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer_config.json", '{"eos_token": "<stop>"}', "names the eos_token '<stop>', which .* lacks"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("special_tokens_map.json", "[]", "special_tokens_map.json is not a JSON object"),
        ("added_tokens.json", '{"<tool>": 262}', "lacks 1 tokens that files beside it add: <tool>"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"262": {"content": "<tool>"}}}', "add: <tool>"),
    ],
)
def test_files_that_contradict_the_tokenizer_are_refused(path: Path, name: str, text: str, words: str) -> None:
    (path.parent / name).write_text(text)
    with pytest.raises(DataError, match=words):
        load_tokenizer(str(path))


def test_prepare_names_the_token(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say(path, tokenizer_config={"eos_token": "<eos>", "bos_token": "<bos>"})
    source, output = path.parent / "texts.jsonl", path.parent / "out"
    source.write_text('{"text": "price <s>20</s> 10"}\n')
    words = ["data", "prepare", str(source), "--output", str(output), "--tokenizer", str(path), "--workers", "1"]
    assert main([*words, "--add-bos"]) == 0
    line = (
        "documents begin with '<bos>', token 258, and end with '<eos>', token 257 (eos_token of tokenizer_config.json)"
    )
    assert capsys.readouterr().out.splitlines()[-1] == line
    ids = indexed_dataset.open_dataset(output)[0].tolist()
    assert ids[0] == 258 and ids[-1] == 257 and ids.count(257) == 1 and 261 in ids


def test_the_beginning_of_a_text(path: Path) -> None:
    assert FileTokenizer(path).bos == 258
    assert not FileTokenizer(path).frames_with_bos
