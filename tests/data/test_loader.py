"""What each rank trains on in a step: the rows of the global batch, once each, whatever the layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.core.errors import DataError
from megascale.data.loader import Loader, Shape
from megascale.data.mixture import Sample
from megascale.parallel.microbatch import MicroBatch, StepBatch

CPU = torch.device("cpu")
SEQUENCE = 5


class Numbered:
    """Sample i is made of the number i; of every third, the first i % 5 labels do not count. Sample `bad` cannot be
    read.
    """

    def __init__(self, masked: bool = False, bad: int = -1) -> None:
        self.samples = 1 << 30
        self.prepared: list[tuple[int, int]] = []
        self.read: list[int] = []
        self._masked = masked
        self._bad = bad

    def __getitem__(self, index: int) -> Sample:
        self.read.append(index)
        if index == self._bad:
            raise DataError(f"sample {index} is bad")
        tokens = index * 10 + torch.arange(SEQUENCE + 1)
        mask = (torch.arange(SEQUENCE) >= index % 5).float() if self._masked and index % 3 == 0 else None
        return Sample(tokens[:-1], tokens[1:], mask)

    def prepare(self, start: int, stop: int) -> None:
        self.prepared.append((start, stop))


def loader(shape: Shape, rank: int, *, masked: bool = False, empty: bool = False) -> Loader:
    return Loader(None if empty else Numbered(masked), shape, rank, dropout=0.5, seed=3, device=CPU)


def kept(batch: MicroBatch) -> torch.Tensor:
    """What dropout keeps of a micro-batch: it follows from the numbers of its samples."""
    rows = batch.dropout.attention("here", range(1), 16)
    assert rows is not None
    return rows


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    micro, ranks, micro_batches = (draw(st.integers(1, 6)) for _ in range(3))
    return Shape(micro * ranks * micro_batches, micro, ranks)


@given(shapes())
def test_rows_cover_the_global_batch_once(shape: Shape) -> None:
    dealt = [shape.rows(batch, rank) for batch in range(shape.micro_batches) for rank in range(shape.ranks)]
    assert all(len(rows) == shape.micro for rows in dealt)
    assert sorted(row for rows in dealt for row in rows) == list(range(shape.total))


@given(shapes(), st.integers(0, 1000), st.booleans())
def test_any_layout_trains_on_the_samples_that_follow(shape: Shape, seen: int, masked: bool) -> None:
    found, tokens = [], 0
    for rank in range(shape.ranks):
        batch = loader(shape, rank, masked=masked).batch(seen)
        tokens += batch.tokens
        for index in range(shape.micro_batches):
            part = batch.micro_batch(index)
            assert part.tokens is not None and part.labels is not None
            assert part.tokens.shape == part.labels.shape == (SEQUENCE, shape.micro)
            assert part.labels.equal(part.tokens + 1)
            found += (part.tokens[0] // 10).tolist()
    assert sorted(found) == list(range(seen, seen + shape.total))
    masks = [i % 5 for i in found if masked and i % 3 == 0]
    assert tokens == shape.total * SEQUENCE - sum(masks)


@given(shapes())
def test_masks_are_those_of_the_rows(shape: Shape) -> None:
    part = loader(shape, 0, masked=True).batch(0).micro_batch(0)
    samples = Numbered(True)
    own = [samples[row].mask for row in shape.rows(0, 0)]
    assert (part.mask is None) == all(mask is None for mask in own)
    if part.mask is not None:
        expected = [torch.ones(SEQUENCE) if mask is None else mask for mask in own]
        assert part.mask.equal(torch.stack(expected, 1))


def test_a_step_goes_on_where_the_last_one_ended() -> None:
    shape = Shape(4, 2, 1)
    steps = loader(shape, 0).batches(3)
    first = [(part.micro_batch(0).tokens, part.micro_batch(1).tokens) for part in steps]
    numbers = [(tokens[0] // 10).tolist() for pair in first for tokens in pair if tokens is not None]
    assert numbers == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_between_the_ends_has_the_numbers_of_samples_it_does_not_read(rank: int) -> None:
    shape = Shape(12, 2, 2)
    full, empty = loader(shape, rank).batch(7), loader(shape, rank, empty=True).batch(7)
    assert empty.tokens == 0
    for index in range(shape.micro_batches):
        one, other = full.micro_batch(index), empty.micro_batch(index)
        assert (other.tokens, other.labels, other.mask) == (None, None, None)
        assert kept(one).equal(kept(other))
        assert not kept(one)[0].equal(kept(one)[1])


# Reading ahead.

FOUR = Shape(8, 1, 2)
"""Four micro-batches a step on each of two ranks."""


def reading(samples: Numbered) -> Loader:
    return Loader(samples, FOUR, 1, dropout=0.0, seed=3, device=CPU)


def firsts(batch: StepBatch) -> list[int]:
    """The samples of a batch."""
    found = [batch.micro_batch(index).tokens for index in range(4)]
    return [int(tokens[0]) // 10 for tokens in found if tokens is not None]


def test_a_batch_that_was_read_ahead_is_not_read_again() -> None:
    samples = Numbered()
    ahead = reading(samples)
    ahead.read_ahead(8)
    assert samples.read == [9, 11, 13, 15]
    batch = ahead.batch(8)
    assert firsts(batch) == samples.read == [9, 11, 13, 15]
    assert batch.tokens == 4 * SEQUENCE


def test_what_was_read_ahead_is_of_no_other_step() -> None:
    ahead = reading(Numbered())
    ahead.read_ahead(8)
    assert firsts(ahead.batch(16)) == [17, 19, 21, 23]
    assert firsts(ahead.batch(8)) == [9, 11, 13, 15], "made anew"


def test_a_bad_sample_is_an_error_of_the_step_that_has_it() -> None:
    ahead = reading(Numbered(bad=13))
    ahead.read_ahead(8)
    assert firsts(ahead.batch(0)) == [1, 3, 5, 7]
    with pytest.raises(DataError, match="sample 13 is bad"):
        ahead.batch(8)


def test_indices_are_written_before_any_rank_reads_ahead() -> None:
    """In step n a rank reads samples of step n + 1 once it has the sums of step n - 1, to which rank 0 has added its
    own in the middle of that step.
    """
    samples, total = Numbered(), FOUR.total
    first = reading(samples)
    first.prepare(0)
    written = {-1: samples.prepared[-1][1]}  # by the last step whose sums a rank knows
    for step in range(5):
        first.batch(step * total)
        written[step] = max(stop for _, stop in samples.prepared)
        first.read_ahead((step + 1) * total)
    for step in range(5):
        assert written[step - 1] >= (step + 2) * total
