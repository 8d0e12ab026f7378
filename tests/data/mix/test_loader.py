"""The ranks of a step train on every row of the global batch exactly once, in any layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.core.errors import DataError
from megascale.data.mix.loader import BatchShape, Loader
from megascale.data.mix.samples import Sample, SampleSource
from megascale.parallel.microbatch import MicroBatch, StepBatch

CPU = torch.device("cpu")
SEQUENCE = 5


class NumberedSamples(SampleSource):
    """A sample source whose tokens encode the sample index. If `masked`, the first i % 5 labels of every third sample i
    are masked. Sample `bad` cannot be read, with an `error`.
    """

    def __init__(self, masked: bool = False, bad: int = -1, error: type[Exception] = DataError) -> None:
        self.read: list[int] = []
        self._masked = masked
        self._bad, self._error = bad, error

    def __getitem__(self, index: int) -> Sample:
        self.read.append(index)
        if index == self._bad:
            raise self._error(f"sample {index} is bad")
        tokens = index * 10 + np.arange(SEQUENCE + 1)
        mask = (np.arange(SEQUENCE) >= index % 5).astype(np.float32) if self._masked and index % 3 == 0 else None
        return Sample(tokens, mask)


def loader(shape: BatchShape, rank: int, *, masked: bool = False, empty: bool = False) -> Loader:
    return Loader(None if empty else NumberedSamples(masked), shape, rank, dropout=0.5, seed=3, device=CPU)


def keep_mask(batch: MicroBatch) -> torch.Tensor:
    """The keep mask of a micro-batch's dropout, a function of its sample indices."""
    mask = batch.dropout.attention_keep_mask("here", range(1), 16)
    assert mask is not None
    return mask


@st.composite
def shapes(draw: st.DrawFn) -> BatchShape:
    micro, ranks, micro_batches = (draw(st.integers(1, 6)) for _ in range(3))
    return BatchShape(micro * ranks * micro_batches, micro, ranks)


@given(shapes())
def test_rows_cover_the_global_batch_once(shape: BatchShape) -> None:
    dealt = [shape.rows(batch, rank) for batch in range(shape.num_microbatches) for rank in range(shape.dp)]
    assert all(len(rows) == shape.micro_batch for rows in dealt)
    assert sorted(row for rows in dealt for row in rows) == list(range(shape.global_batch))


@given(shapes(), st.integers(0, 1000), st.booleans())
def test_any_layout_trains_on_the_next_samples(shape: BatchShape, seen: int, masked: bool) -> None:
    sample_ids, tokens = [], 0
    for rank in range(shape.dp):
        batch = loader(shape, rank, masked=masked).batch(seen)
        tokens += batch.loss_tokens
        for index in range(shape.num_microbatches):
            part = batch.micro_batches[index]
            assert part.tokens is not None and part.labels is not None
            assert part.tokens.shape == part.labels.shape == (SEQUENCE, shape.micro_batch)
            assert part.labels.equal(part.tokens + 1)
            sample_ids += (part.tokens[0] // 10).tolist()
    assert sorted(sample_ids) == list(range(seen, seen + shape.global_batch))
    masks = [i % 5 for i in sample_ids if masked and i % 3 == 0]
    assert tokens == shape.global_batch * SEQUENCE - sum(masks)


@given(shapes())
def test_micro_batches_have_the_masks_of_their_rows(shape: BatchShape) -> None:
    part = loader(shape, 0, masked=True).batch(0).micro_batches[0]
    samples = NumberedSamples(True)
    masks = [samples[row].mask for row in shape.rows(0, 0)]
    assert (part.mask is None) == all(mask is None for mask in masks)
    if part.mask is not None:
        expected = [np.ones(SEQUENCE, dtype=np.float32) if mask is None else mask for mask in masks]
        assert part.mask.equal(torch.from_numpy(np.stack(expected, 1)))


def test_a_step_continues_after_the_previous_step() -> None:
    shape = BatchShape(4, 2, 1)
    steps = loader(shape, 0).batches(3)
    first = [(part.micro_batches[0].tokens, part.micro_batches[1].tokens) for part in steps]
    numbers = [(tokens[0] // 10).tolist() for pair in first for tokens in pair if tokens is not None]
    assert numbers == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_middle_stage_draws_dropout_for_the_samples_it_does_not_read(rank: int) -> None:
    shape = BatchShape(12, 2, 2)
    full, empty = loader(shape, rank).batch(7), loader(shape, rank, empty=True).batch(7)
    assert empty.loss_tokens == 0
    for index in range(shape.num_microbatches):
        micro_batch, middle_stage = full.micro_batches[index], empty.micro_batches[index]
        assert (middle_stage.tokens, middle_stage.labels, middle_stage.mask) == (None, None, None)
        assert keep_mask(micro_batch).equal(keep_mask(middle_stage))
        assert not keep_mask(micro_batch)[0].equal(keep_mask(micro_batch)[1])


# Prefetching.

FOUR = BatchShape(8, 1, 2)
"""Four micro-batches a step on each of two ranks."""


def prefetching_loader(samples: NumberedSamples) -> Loader:
    return Loader(samples, FOUR, 1, dropout=0.0, seed=3, device=CPU)


def sample_indices(batch: StepBatch) -> list[int]:
    """The sample indices of a batch."""
    parts = [batch.micro_batches[index].tokens for index in range(4)]
    return [int(tokens[0]) // 10 for tokens in parts if tokens is not None]


def test_a_prefetched_batch_is_read_once() -> None:
    samples = NumberedSamples()
    loader = prefetching_loader(samples)
    loader.prefetch(8)
    assert samples.read == [9, 11, 13, 15]
    batch = loader.batch(8)
    assert sample_indices(batch) == samples.read == [9, 11, 13, 15]
    assert batch.loss_tokens == 4 * SEQUENCE


def test_a_prefetched_batch_serves_no_other_step() -> None:
    loader = prefetching_loader(NumberedSamples())
    loader.prefetch(8)
    assert sample_indices(loader.batch(16)) == [17, 19, 21, 23]
    assert sample_indices(loader.batch(8)) == [9, 11, 13, 15], "read a second time"


@pytest.mark.parametrize("error", [DataError, OSError])
def test_a_bad_sample_is_an_error_of_its_own_step(error: type[Exception]) -> None:
    loader = prefetching_loader(NumberedSamples(bad=13, error=error))
    loader.prefetch(8)
    assert sample_indices(loader.batch(0)) == [1, 3, 5, 7]
    with pytest.raises(error, match="sample 13 is bad"):
        loader.batch(8)


@pytest.mark.parametrize("error", [torch.AcceleratorError, torch.OutOfMemoryError, TypeError])
def test_an_error_of_the_device_or_of_the_program_is_raised_at_once(error: type[Exception]) -> None:
    with pytest.raises(error, match="sample 13 is bad"):
        prefetching_loader(NumberedSamples(bad=13, error=error)).prefetch(8)
