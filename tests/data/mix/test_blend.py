"""Every sample of a blend has a dataset and a number in it, by arithmetic, also when the weights change."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.core.errors import ConfigError
from megascale.data.mix.blend import MOST_AHEAD, Blend, ChangingBlend, Part, blend_parts, same_order
from megascale.train.resumed_order import check_weights
from tests.data.datasets import data_config, mixture_of, write_dataset
from tests.data.resumed_jobs import check_resumed
from tests.jobs import Job, job_config
from tests.runs import GPT

WEIGHTS = st.lists(st.floats(2.0**-126, 2.0**127), min_size=1, max_size=8)


@given(WEIGHTS, st.integers(0, 10**12))
def test_a_sample_s_number_counts_the_samples_before_it(weights: list[float], start: int) -> None:
    blend = Blend(weights)
    counts = [blend.count(dataset, start) for dataset in range(len(weights))]
    assert sum(counts) == start
    for index in range(start, start + 50):
        dataset, number = blend.locate(index)
        assert number == counts[dataset]
        counts[dataset] += 1


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=40), st.integers(1, 10**6))
def test_no_dataset_is_far_from_its_share(weights: list[float], samples: int) -> None:
    blend = Blend(weights)
    for dataset, weight in enumerate(weights):
        share = samples * weight / sum(weights)
        assert blend.count(dataset, samples) == pytest.approx(share, abs=MOST_AHEAD + 1e-6)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([1], "0000"), ([1, 1], "0101"), ([3, 1], "00100010"), ([1, 1, 1, 1], "02130213"), ([1, 2], "101101101")],
)  # fmt: skip
def test_an_order_by_hand(weights: list[float], expected: str) -> None:
    blend = Blend(weights)
    found = [blend.locate(index)[0] for index in range(len(expected))]
    assert sorted(found) == sorted(map(int, expected))
    if weights == [1, 1]:
        assert found[:2] in ([0, 1], [1, 0])


def test_scaled_weights_give_the_same_order() -> None:
    one, other = Blend([0.7, 0.2, 0.1]), Blend([7 * 2.0**20, 2 * 2.0**20, 2.0**20])
    assert [one.locate(index) for index in range(500)] == [other.locate(index) for index in range(500)]


def test_a_tiny_weight_has_its_samples_late_but_has_them() -> None:
    blend = Blend([1.0, 2.0**-40])
    assert [blend.count(1, samples) for samples in (2**38, 2**41)] == [0, 2]


CHANGING = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]), min_size=3, max_size=3).filter(any)


@st.composite
def parts(draw: st.DrawFn) -> list[Part]:
    starts = [0, *sorted(draw(st.sets(st.integers(1, 60), max_size=3)))]
    return [(start, draw(CHANGING)) for start in starts]


@given(parts())
def test_a_sample_s_number_counts_all_samples_of_its_dataset_before_it(found: list[Part]) -> None:
    blend, before = ChangingBlend(found), Counter[int]()
    for index in range(100):
        assert [blend.count(dataset, index) for dataset in range(3)] == [before[dataset] for dataset in range(3)]
        dataset, number = blend.locate(index)
        assert number == before[dataset]
        before[dataset] += 1


@given(parts())
def test_a_part_has_its_weights(found: list[Part]) -> None:
    blend = ChangingBlend(found)
    for (start, weights), end in zip(found, [*(start for start, _ in found[1:]), 100], strict=True):
        for dataset, weight in enumerate(weights):
            share = weight / sum(weights) * (end - start)
            assert abs(blend.count(dataset, end) - blend.count(dataset, start) - share) <= MOST_AHEAD


def test_without_changes_it_is_the_blend() -> None:
    weights = [0.7, 0.2, 0.1]
    blend, changing = Blend(weights), ChangingBlend(blend_parts(weights, []))
    assert [changing.locate(index) for index in range(200)] == [blend.locate(index) for index in range(200)]


def test_orders_are_compared_up_to_a_place() -> None:
    parts = blend_parts([0.7, 0.3], [(50, [1, 0])])
    assert same_order(parts, [(0, [7, 3, 0]), (50, [2, 0, 0]), (80, [0, 1, 1])], 80)
    assert not same_order(parts, [(0, [7, 3, 0]), (50, [2, 0, 0]), (80, [0, 1, 1])], 81)
    assert not same_order(parts, [(0, [0.7, 0.3])], 51)
    assert same_order(parts, [(0, [0.7, 0.3])], 50)
    assert blend_parts([1.0, 1.0], [(0, [1, 0])]) == [(0, [1, 0])]


@pytest.mark.parametrize(
    ("weights", "others", "accepted"),
    [
        ([1, 1, 1], [1 / 3] * 3, False),
        ([1] * 3, [0.1] * 3, False),
        ([1] * 5, [0.2] * 5, False),
        ([1] * 10, [0.1] * 10, False),
        ([1, 1, 1, 3], [0.1, 0.1, 0.1, 0.3], False),
        ([7, 3], [0.7, 0.3], True),
        ([50, 30, 20], [0.5, 0.3, 0.2], True),
        ([3, 3, 3], [1, 1, 1], True),
        ([0.7, 0.2, 0.1], [0.7 * 2**20, 0.2 * 2**20, 0.1 * 2**20, 0], True),
        ([0, 0.7, 0.3], [0.7, 0, 0.3], False),
    ],
)
def test_rescaled_weights_are_accepted_if_their_order_is_the_same(
    weights: list[float], others: list[float], accepted: bool
) -> None:
    one, other = ChangingBlend([(0, weights)]), ChangingBlend([(0, others)])
    assert all(one.locate(index) == other.locate(index) for index in range(300)) == accepted
    assert same_order([(0, weights)], [(0, others)], 300) == accepted


@given(CHANGING, st.sampled_from([0.1, 1 / 3, 3.0, 7.0, 2.0**-9]))
def test_what_is_accepted_has_the_same_order(weights: list[float], factor: float) -> None:
    others = [weight * factor for weight in weights]
    if same_order([(0, weights)], [(0, others)], 100):
        one, other = ChangingBlend([(0, weights)]), ChangingBlend([(0, others)])
        assert all(one.locate(index) == other.locate(index) for index in range(100))
    assert factor != 2.0**-9 or same_order([(0, weights)], [(0, others)], 100)


def test_decomposed_documents_need_the_same_numbers() -> None:
    assert same_order([(0, [7, 3])], [(0, [0.7, 0.3])], 50) and not same_order(
        [(0, [7, 3])], [(0, [0.7, 0.3])], 50, True
    )
    assert same_order([(0, [0.7, 0.3])], [(0, [0.7, 0.3, 0]), (50, [1, 1, 1])], 50, True)


def test_a_resume_with_other_weights_says_what_to_write(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_dataset(tmp_path / name, [30, 40])
    saved = {"train": [[0.5, "x/a"], [0.5, "x/b"]]}
    config = data_config(tmp_path, [(0.2, tmp_path / "a"), (0.8, tmp_path / "b")])
    with pytest.raises(ConfigError, match=r"data.blend_schedule = \[\[0, \[0.5, 0.5\]\]\], and new weights from 24 on"):
        check_weights(config.data, saved, 24)
    later = config.data.model_copy(update={"blend_schedule": [(0, [0.5, 0.5]), (24, [0.2, 0.8])]})
    check_weights(later, saved, 24)
    with pytest.raises(ConfigError, match="has other weights below 25"):
        check_weights(later, saved, 25)
    saved = {"train": [[2, "x/a"], [8, "x/b"]]}
    check_weights(config.data, saved, 24)
    decomposed = config.data.model_copy(update={"packing": "decompose"})
    with pytest.raises(ConfigError, match=r"data.blend_schedule = \[\[0, \[2, 8\]\]\]"):
        check_weights(decomposed, saved, 24)


def test_a_mixture_reads_every_sample_of_a_dataset_in_its_order(tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        write_dataset(tmp_path / name, [30, 17, 41] * 9, first=5000 * number)
    blend = [(0.5, tmp_path / name) for name in "abc"]
    config = data_config(tmp_path, blend, data__mock=False, data__train=[[w, str(p)] for w, p in blend],
                         data__blend_schedule=[[0, [1, 1, 0]], [20, [0, 1, 3]], [50, [1, 1, 1]]])  # fmt: skip
    found = [mixture_of(config)[index].tokens.tolist() for index in range(90)]
    for number, name in enumerate("abc"):
        alone = mixture_of(data_config(tmp_path, tmp_path / name))
        mine = [tokens for tokens in found if tokens[0] // 5000 == number]
        assert mine == [alone[index].tokens.tolist() for index in range(len(mine))] and len(mine) > 15


@pytest.mark.slow
def test_a_resume_with_other_weights_layout_and_reader_goes_on_with_the_next_sample(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        write_dataset(tmp_path / name, [60, 41, 33, 25] * 10, first=8000 * number)
        (tmp_path / f"{name}.json").unlink()
    train = [[0.5, str(tmp_path / "a")], [0.5, str(tmp_path / "b")]]
    data = {"data__mock": False, "data__train": train, "data__split": [1.0, 0.0], "checkpoint__every": 3}
    data |= {"optimizer__decay": "constant"}  # of which a run of four steps is the first half
    check_resumed(tmp_path, data, "data.blend_schedule=[[32, [0.1, 0.9]]]")
    status, _, err = Job(job_config(tmp_path / "whole", GPT | {"vocab_size": 20_000}, **data, train__steps=9)).end()
    assert status == 2 and "data.blend_schedule: has other weights below 64" in err
