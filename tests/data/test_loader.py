"""What each rank trains on in a step: the rows of the global batch, once each, whatever the layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.data.loader import Loader, Shape
from megascale.data.mixture import Sample
from megascale.parallel.microbatch import MicroBatch

CPU = torch.device("cpu")
SEQUENCE = 5


class Numbered:
    """Sample i is made of the number i; of every third, the first i % 5 labels do not count."""

    def __init__(self, masked: bool) -> None:
        self.samples = 1 << 30
        self.prepared: list[tuple[int, int]] = []
        self._masked = masked

    def __getitem__(self, index: int) -> Sample:
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
