"""The index of an epoch equals megatron-core's, and its pieces are the tokens between neighbouring samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.data.read import epoch_index
from megascale.data.read.epoch_index import EpochIndex, IndexShape


def megatron_index(lengths: np.ndarray, documents: range, seq_length: int, seed: int) -> list[np.ndarray]:
    """The document index, sample index and shuffle index of a GPTDataset of an epoch, by its own functions."""
    from megatron.core.datasets import gpt_dataset, helpers

    random = np.random.RandomState(seed)
    order = gpt_dataset._build_document_index(np.array(documents, dtype=np.int32), 1, random, False)
    tokens = int(lengths[documents.start : documents.stop].sum())
    samples = helpers.build_sample_idx(lengths, order, seq_length, 1, tokens, True, True)
    count = len(samples) - 1
    return [order, samples, gpt_dataset._build_shuffle_index(count, count, random)]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60),
    st.integers(2, 20),
    st.integers(0, 2**32 - 1),
    st.integers(0, 5),
)
def test_an_index_equals_that_of_megatron_core(lengths: list[int], seq_length: int, seed: int, first: int) -> None:
    sizes = np.array([7] * first + lengths, dtype=np.int32)
    shape = IndexShape(first, len(sizes), sum(lengths), seq_length)
    if not shape.samples:
        return
    index = shape.build(sizes, seed)
    for ours, theirs in zip(
        (index.documents, index.starts, index.order), megatron_index(sizes, range(first, len(sizes)), seq_length, seed),
        strict=True,
    ):  # fmt: skip
        assert ours.dtype == theirs.dtype and (ours == theirs).all()


def test_an_index_of_many_blocks_equals_one_of_a_single_block(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(1).integers(0, 9, 500).astype(np.int32)
    shape = IndexShape(3, 490, int(lengths[3:490].sum()), 7)
    whole = shape.build(lengths, 5)
    monkeypatch.setattr(epoch_index, "BLOCK_DOCUMENTS", 13)
    blocks = shape.build(lengths, 5)
    assert (whole.starts == blocks.starts).all() and (whole.order == blocks.order).all()


def test_lengths_that_are_not_those_of_the_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="documents 0 to 2 have 5 tokens, not 50"):
        IndexShape(0, 2, 50, 4).build(np.array([2, 3], dtype=np.int32), 1)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=30), st.integers(2, 9))
def test_pieces_are_the_tokens_of_a_sample_and_its_last_label(lengths: list[int], seq_length: int) -> None:
    sizes = np.array(lengths, dtype=np.int32)
    shape = IndexShape(0, len(sizes), sum(lengths), seq_length)
    if not shape.samples:
        return
    index = shape.build(sizes, 3)
    stream = [(int(d), token) for d in index.documents for token in range(sizes[d])]
    for number, sample in enumerate(index.order.tolist()):
        pieces = index.pieces(number, sizes)
        tokens = [(document, token) for document, start, stop in pieces for token in range(start, stop)]
        assert tokens == stream[sample * seq_length : (sample + 1) * seq_length + 1]


@pytest.mark.parametrize(
    ("documents", "starts", "order"),
    [([0, -1], [[0, 0], [1, 0]], [0]), ([0, 1], [[0, 0], [2, 0]], [0]), ([0, 1], [[1, 0], [0, 0]], [0]),
     ([0, 9], [[0, 0], [1, 0]], [0]), ([0, 1], [[-1, 0], [1, 0]], [0]), ([9, 1], [[0, 0], [1, 0]], [0])],
)  # fmt: skip
def test_entries_out_of_range_are_errors(documents: list[int], starts: list[list[int]], order: list[int]) -> None:
    index = EpochIndex(IndexShape(0, 2, 8, 4), np.array(documents), np.array(starts), np.array(order))
    lengths = np.array([4, 4])
    with pytest.raises(IndexError):
        for document, start, stop in index.pieces(0, lengths):
            assert lengths[document] >= stop - start
