"""The weights of a mixture that a policy changes: where they begin, and the way of them to readers and checkpoints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from megascale.config.batch_rampup import batch_sizes
from megascale.config.run import RunConfig
from megascale.data.host_reader.reader_process import SplitReader
from megascale.data.mix.blend import ChangingBlend
from megascale.data.mix.data_policy import MixtureWeights, next_place, numbers, shares
from megascale.data.mix.skipped_ranges import order_index
from tests.data.datasets import data_config, mixture_of, write_dataset
from tests.data.host_reader.test_host_reader import BATCH, STEPS, Readers, blend

WEIGHTS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=3, max_size=3).filter(any)
CHANGES = st.lists(st.tuples(st.integers(1, 30), WEIGHTS), max_size=4)


def grown(first: list[float], changes: list[tuple[int, list[float]]]) -> tuple[MixtureWeights, ChangingBlend]:
    """The weights after changes, each some samples after the one before it, and the blend with all of them."""
    weights, place, parts = MixtureWeights.first(first), 0, [(0, first)]
    for distance, found in changes:
        place += distance
        weights = weights.changed(place, found)
        parts.append((place, found))
    return weights, ChangingBlend(parts)


@given(WEIGHTS, CHANGES)
def test_readers_need_the_last_two_parts_alone(first: list[float], changes: list[tuple[int, list[float]]]) -> None:
    weights, whole = grown(first, changes)
    assert len(weights.parts) <= 2
    blend = weights.blend()
    for place in range(weights.parts[0][0], weights.parts[0][0] + 80):
        assert blend.locate(place) == whole.locate(place)


@given(WEIGHTS, CHANGES)
def test_weights_are_themselves_after_their_way_as_numbers(
    first: list[float], changes: list[tuple[int, list[float]]]
) -> None:
    weights, _ = grown(first, changes)
    found = weights.to_numbers()
    assert MixtureWeights.from_numbers(found) == weights and len(found) == numbers(3)


def test_shares_do_not_depend_on_the_last_bits() -> None:
    assert shares([1, 2]) == shares([1 + 1e-12, 2 - 1e-12]) == (0.333333, 0.666667)


def place_after(config: RunConfig, samples: int) -> int:
    return next_place(batch_sizes(config.batch), config.data.prefetch, config.data.skip_samples, samples)


def test_new_weights_begin_with_the_first_step_that_no_reader_has_read(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", [30, 40])
    keys = {"data__prefetch": 3, "data__skip_samples": [[20, 30]], "batch__rampup": [2, 2, 12]}
    config = data_config(tmp_path, tmp_path / "a", **keys)
    assert place_after(config, 0) == order_index(2 + 2 + 4 + 6, config.data.skip_samples) == 14
    assert place_after(config, 20) == 20 + 4 * 8 + 10


def test_the_reader_follows_new_weights_from_their_place_on(tmp_path: Path) -> None:
    """Also one that is started anew; the steps that were read ahead stay as they are."""
    config = blend(tmp_path, data__prefetch=2)
    weights = MixtureWeights.first([0.7, 0.3])
    readers = Readers(config, 1, [0], weights=numbers(2))
    reader = SplitReader(readers.work, "train", readers.memory)
    readers.views[0].begin(0)
    place, expected = place_after(config, BATCH * 3), mixture_of(config)
    changed = MixtureWeights.first([0.7, 0.3]).changed(place, (0.1, 0.9))
    expected.change_weights(changed)
    for step in range(STEPS):
        while reader.fill_next():
            pass
        if step == 3:  # after the third step, and the prefetch of the next
            readers.views[0].change_weights(changed)
        if step == 10:
            reader = SplitReader(readers.work, "train", readers.memory)
        tokens = [expected[BATCH * step + row].tokens.tolist() for row in readers.rows]
        assert readers.read(0, BATCH * step) == tokens
    found = Counter(expected.locate(index)[0].prefix for index in range(place, BATCH * STEPS))
    assert found[str(tmp_path / "b")] > 5 * found[str(tmp_path / "a")]
    assert weights.blend().locate(place + 1) != changed.blend().locate(place + 1)
