"""The order of decomposed samples: a bucket for each turn, in the order of a curriculum, by arithmetic."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError
from megascale.data.mix.blend import MOST_AHEAD, ChangingBlend
from megascale.data.mix.bucket_order import BucketOrder, Curriculum
from megascale.train.resumed_order import check_turns
from tests.data.datasets import write_dataset
from tests.data.read.test_decomposed_index import LENGTHS, decomposed
from tests.data.resumed_jobs import check_resumed
from tests.jobs import Job

SAMPLES = [[30, 20, 10, 0], [5, 0, 15, 40]]


@st.composite
def orders(draw: st.DrawFn) -> BucketOrder:
    """An order of two datasets and four buckets, whose weights change."""
    turn, odds = draw(st.integers(1, 5)), draw(st.sampled_from([None, [8, 4, 2, 1], [0.1, 1, 10, 1]]))
    cycle = draw(st.integers(1, 20))
    unit = turn * (cycle if odds else 1)
    starts = [0, *(unit * place for place in sorted(draw(st.sets(st.integers(1, 20), max_size=3))))]
    weights = st.sampled_from([[1.0, 1.0], [0.0, 2.0], [3.0, 0.5], [1.0, 0.0]])
    return BucketOrder(
        SAMPLES, [(start, draw(weights)) for start in starts], turn, odds, cycle, draw(st.integers(0, 9))
    )


@settings(max_examples=25)
@given(orders())
def test_a_sample_s_number_counts_all_of_its_bucket_and_dataset_before_it(order: BucketOrder) -> None:
    before = Counter[int]()
    for place in range(150):
        source, number = order.locate(place)
        assert number == before[source]
        assert SAMPLES[source // 4][source % 4], "an empty bucket is never read"
        if place % 7 == 0:
            assert [order.count(source, place) for source in range(8)] == [before[source] for source in range(8)]
        before[source] += 1


@given(st.integers(1, 6), st.sampled_from([None, [8.0, 4, 2, 1]]))
def test_a_turn_has_one_bucket_and_all_have_their_share(turn: int, odds: list[float] | None) -> None:
    order, cycle = BucketOrder(SAMPLES, [(0, [1.0, 1.0])], turn, odds, 40, 0), 40
    found = [[order.locate(turn * number + place)[0] % 4 for place in range(turn)] for number in range(3 * cycle)]
    assert all(len(set(buckets)) == 1 for buckets in found)
    shares = [(first / 60 + second / 60) / 2 for first, second in zip(*SAMPLES, strict=True)]
    for end in (cycle, 2 * cycle, 3 * cycle):
        counts = Counter(buckets[0] for buckets in found[:end])
        assert all(abs(counts[bucket] - share * end) <= MOST_AHEAD for bucket, share in enumerate(shares))


def test_a_curriculum_begins_every_cycle_with_short_pieces() -> None:
    blend, cycle = ChangingBlend([(0, [1.0, 1.0, 1.0, 1.0])]), 400
    turns = Curriculum(blend, [8, 4, 2, 1], cycle, 3)
    for first in (0, cycle, 2 * cycle):
        quarter = [turns.locate(first + turn)[0] for turn in range(cycle // 4)]
        last = [turns.locate(first + turn)[0] for turn in range(3 * cycle // 4, cycle)]
        assert quarter.count(0) == pytest.approx(cycle / 4 * 8 / 15, abs=16) and quarter.count(3) < 16
        assert set(last) <= {2, 3} and last.count(3) > last.count(2)
    orders = [[turns.locate(first + turn)[0] for turn in range(cycle)] for first in (0, cycle)]
    assert orders[0] != orders[1], "each cycle is drawn"
    again = Curriculum(blend, [8, 4, 2, 1], cycle, 3)
    assert [again.locate(turn)[0] for turn in reversed(range(cycle))] == orders[0][::-1]


def test_a_resume_keeps_the_order_of_lengths(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", LENGTHS)
    config = decomposed(tmp_path)
    saved: dict[str, Any] = config.model_dump(mode="json", by_alias=True)

    def check(now: RunConfig, samples: int) -> None:
        check_turns(now.data, now.batch.total, now.model.seq_length, saved, samples)

    smaller = config.model_copy(update={"batch": config.batch.model_copy(update={"total": 4})})
    check(config, 8)
    check(smaller, 0)
    with pytest.raises(ConfigError, match=r"turns of 4 samples of a length, and the checkpoint of 8"):
        check(smaller, 8)
    for key, value, message in (
        ("curriculum", "grow_p2", 'data.curriculum = "mixed"'),
        ("decompose_min_length", 4, "data.decompose_min_length = 2"),
        ("decompose_cycle", 3, "cycle: is 3, and the order of the samples that the run has read is of 128"),
    ):
        other = config.model_copy(update={"data": config.data.model_copy(update={key: value})})
        with pytest.raises(ConfigError, match=message):
            check(other, 8)
    same = config.model_copy(update={"data": config.data.model_copy(update={"decompose_cycle": 128})})
    check(same, 8)
    kept = smaller.model_copy(update={"data": smaller.data.model_copy(update={"decompose_bucket_samples": 8})})
    check(kept, 8)


@pytest.mark.slow
def test_a_resume_with_another_layout_and_reader_goes_on_with_the_next_sample(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", [60, 41, 33, 27, 6, 14] * 30)
    (tmp_path / "set.json").unlink()  # the description has a larger vocabulary than the model
    data = {"data__mock": False, "data__train": str(tmp_path / "set"), "data__split": [1.0, 0.0],
            "data__packing": "decompose", "data__attention_mask": "document", "data__decompose_min_length": 2,
            "data__curriculum": "grow_p2", "data__decompose_cycle": 8, "checkpoint__every": 3,
            "optimizer__decay": "constant"}  # fmt: skip
    config = check_resumed(tmp_path, data)
    _, told, _ = Job(config, "train.steps=9").end()
    assert "samples by the tokens of their pieces: 2 " in told, "the start of a run tells what is not read"
