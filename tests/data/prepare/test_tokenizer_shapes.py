"""tokenizer.json of every family: the ids and texts of transformers' PreTrainedTokenizerFast."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.data.prepare.preparation import PrepareRequest, prepare_dataset
from megascale.data.prepare.tokenizer import FileTokenizer
from megascale.data.read import indexed_dataset
from tests.data.prepare.tokenizer_shapes import SHAPES, TEXTS, save_shape


@pytest.mark.parametrize("name", SHAPES)
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    file = save_shape(name, tmp_path)
    ours, theirs = FileTokenizer(file), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.eod == theirs.eos_token_id and ours.bos == theirs.bos_token_id
    assert ours.frames_with_bos == (theirs("").input_ids[:1] == [theirs.bos_token_id] != [None])
    texts = [*TEXTS, f"a{theirs.eos_token}b </s> <s>c", "\ufffd\x00\x7f"]
    for text, ids in zip(texts, ours.encode(texts), strict=True):
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False)
        decoded = theirs.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert ours.decode(ids.tolist()) == decoded
        assert ids.max() < ours.vocab_size


@pytest.mark.parametrize("name", SHAPES)
def test_a_dataset_holds_these_ids(tmp_path: Path, name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    file = save_shape(name, tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    inputs = [str(tmp_path / f"{number}.txt") for number in range(len(TEXTS))]
    prepare_dataset(PrepareRequest(inputs, tmp_path / "set", str(file)))
    reader = indexed_dataset.open_dataset(tmp_path / "set")
    for number, text in enumerate(TEXTS):
        assert reader[number].tolist() == [*theirs.encode(text, add_special_tokens=False), theirs.eos_token_id]
