"""The steps of a run read every sample once, in order, however often it is resumed in another shape."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megascale.data.mix.batch_shape import BatchShape, StepOrder


@st.composite
def shapes(draw: st.DrawFn) -> BatchShape:
    micro, dp, count = (draw(st.integers(1, 4)) for _ in range(3))
    return BatchShape(micro * dp * count, micro, dp)


@given(st.lists(st.tuples(shapes(), st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=30))
def test_thirty_kills_and_resumes_in_other_shapes_read_every_sample_once(
    starts: list[tuple[BatchShape, int, int]],
) -> None:
    """Every start trains some steps, of which the first so many are in its last checkpoint when it is killed."""
    position, kept = 0, list[int]()
    for shape, steps, saved in starts:
        consumed: int | None = position
        order = StepOrder(shape, position + steps * shape.global_batch)
        for step in range(steps):
            assert consumed == position + step * shape.global_batch
            by_rank = [shape.rows_of([rank]) for rank in range(shape.dp)]
            assert sorted(row for rows in by_rank for row in rows) == list(range(shape.global_batch))
            assert shape.rows_of(range(shape.dp)) == list(range(shape.global_batch))
            if step < saved:
                kept += [consumed + row for rows in by_rank for row in sorted(rows)]
            consumed = order.after(consumed)
        assert consumed is None
        position += min(steps, saved) * shape.global_batch
    assert sorted(kept) == list(range(position))


def test_an_evaluation_begins_again_after_its_last_step() -> None:
    order = StepOrder(BatchShape(4, 1, 2), 12, again=True)
    assert [order.after(consumed) for consumed in (0, 4, 8)] == [4, 8, 0]


def test_the_rows_of_a_host_are_those_of_its_ranks() -> None:
    assert BatchShape(12, 1, 4).rows_of([3, 1, 1]) == [1, 3, 5, 7, 9, 11]
    assert BatchShape(8, 2, 2).rows_of([0]) == [0, 1, 4, 5]
