"""Documents within samples: where they begin follows from the dataset's index and from end-of-document tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.data.mix.loader import BatchShape, Loader
from megascale.data.mix.mock_mixture import MockMixture
from megascale.data.mix.samples import DocumentStarts, Sample, document_starts, label_mask
from megascale.train.run_splits import mixture_spec
from tests.data.datasets import SEQUENCE, data_config, mixture_of, positions_of, write_dataset

LENGTHS = [13, 5, 1, 40, 8, 9, 30, 2, 21, 17, 16, 33]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_positions_and_labels_of_a_sample(lengths: list[int]) -> None:
    """The last token of a sample is a label only."""
    count = sum(lengths) - 1
    if not count:
        return
    starts = document_starts(lengths)
    numbers = [(document, place) for document, length in enumerate(lengths) for place in range(length)]
    sample = Sample(np.arange(count + 1), None, DocumentStarts(starts, count + 1, count))
    assert positions_of(sample).tolist() == [place for _, place in numbers[:-1]]
    mask = label_mask(starts, count)
    expected = [int(label[0] == token[0]) for token, label in itertools.pairwise(numbers)]
    assert (np.ones(count) if mask is None else mask).tolist() == expected
    assert (mask is None) == (len(lengths) == 1)


def test_a_token_ends_documents_too() -> None:
    tokens = np.array([7, 0, 5, 5, 0, 0, 3, 0])
    assert document_starts([3, 5], tokens, eod=0).tolist() == [0, 2, 3, 5, 6]
    assert document_starts([3, 5], tokens).tolist() == [0, 3]


def test_boundaries_are_those_of_the_documents(tmp_path: Path) -> None:
    """Every token is unique and identifies its document."""
    documents = write_dataset(tmp_path / "set", LENGTHS)
    owner = {int(token): number for number, document in enumerate(documents) for token in document}
    samples = mixture_of(data_config(tmp_path, tmp_path / "set", data__attention_mask="document"))
    seen = 0
    for index in range(24):
        sample = samples[index]
        owners = [owner[int(token)] for token in [*sample.tokens, sample.labels[-1]]]
        assert sample.documents is not None
        begins = [place == 0 or owners[place] != owners[place - 1] for place in range(SEQUENCE)]
        assert (positions_of(sample) == 0).tolist() == begins
        assert samples.documents(index).places == sample.documents.places
        mask = np.ones(SEQUENCE) if sample.mask is None else sample.mask
        assert mask.tolist() == [int(a == b) for a, b in itertools.pairwise(owners)]
        seen += sum(begins[1:])
    assert seen, "a sample has several documents"


@pytest.mark.parametrize("key", ["eod_mask_loss", "eod"])
def test_options_of_the_mask(key: str, tmp_path: Path) -> None:
    """Token 3 ends a document within the first one of the dataset."""
    write_dataset(tmp_path / "set", LENGTHS)
    plain = mixture_of(data_config(tmp_path, tmp_path / "set", data__attention_mask="document"))
    value = {"eod_mask_loss": False, "eod": 3}[key]
    changed = mixture_of(
        data_config(tmp_path, tmp_path / "set", data__attention_mask="document", **{f"data__{key}": value})
    )
    if key == "eod_mask_loss":
        assert all(changed[index].mask is None for index in range(24))
        assert any(plain[index].mask is not None for index in range(24))
        return
    differs = [i for i in range(24) if not np.array_equal(positions_of(plain[i]), positions_of(changed[i]))]
    assert differs and all(3 in plain[i].tokens for i in differs)
    for i in differs:
        assert changed.documents(i).places == changed[i].documents.places  # type: ignore[union-attr]


def test_mock_documents_have_the_expected_length(tmp_path: Path) -> None:
    config = data_config(tmp_path, data__attention_mask="document", data__document_length=3)
    sample = MockMixture(mixture_spec(config, "train"))[5]
    assert sample.documents is not None and sample.documents.places == [0, 3, 6]
    whole = MockMixture(mixture_spec(data_config(tmp_path, data__attention_mask="document"), "train"))[5]
    assert whole.mask is None and whole.documents is not None and whole.documents.places == [0]
    plain = MockMixture(mixture_spec(data_config(tmp_path), "train"))[5]
    assert plain.documents is None and np.array_equal(plain.tokens, whole.tokens)


def test_stages_without_tokens_know_the_boundaries(tmp_path: Path) -> None:
    import torch

    write_dataset(tmp_path / "set", LENGTHS)
    samples = mixture_of(data_config(tmp_path, tmp_path / "set", data__attention_mask="document"))
    shape, options = BatchShape(8, 2, 2), {"dropout": 0.0, "seed": 0, "device": torch.device("cpu")}
    first = Loader(samples, shape, 1, **options).batch(8)  # type: ignore[arg-type]
    between = Loader(samples, shape, 1, reads_tokens=False, **options).batch(8)  # type: ignore[arg-type]
    assert len(first.micro_batches) == len(between.micro_batches) == 2
    for known, other in zip(first.micro_batches, between.micro_batches, strict=True):
        assert other.tokens is None and other.boundaries == known.boundaries is not None
        assert known.mask is not None
    assert first.loss_tokens == sum(int(part.mask.sum()) for part in first.micro_batches)  # type: ignore[union-attr]
