"""Times of sequences by length and of context parallelism by mode, for a configuration on hardware."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.config.loading import load_config
from megascale.plan.account.chunk_memory import with_context
from megascale.plan.simulate import profiles
from megascale.plan.simulate.sequence_times import SequenceTimes, ranks_with_offload
from megascale.plan.simulate.step_time import StepParts
from tests.bench.test_profile import truth

HARDWARE, STACK = profiles.hardware("h100"), profiles.stack("megascale")


SPARSE = "model.sparse_attention={local_blocks = 1, stride = 8, block = 64}"


def times_of(*overrides: str, max_tokens: int = 8192) -> SequenceTimes:
    keys = ["batch.global=64", "parallel.vpp=1", *overrides]
    config = load_config("configs/gpu/llama3-8b.toml", keys, world_size=64, skip_sections=["data"])
    return SequenceTimes(config, HARDWARE, STACK, max_tokens)


@pytest.mark.parametrize(
    "keys", [[], ["parallel.pp=2"], ["train.recompute=full"], ["model.window=1024"], [SPARSE]], ids=str
)
def test_work_is_the_stage_s_time_at_other_lengths(keys: list[str]) -> None:
    times = times_of(*keys)
    for length in (8192, 32768):
        longer = times_of(*keys, max_tokens=length).parts.slowest_rank
        expected = longer.forward.total + longer.backward.total
        assert times.work.whole(length) == pytest.approx(expected, rel=0.05)


def test_rows_have_padding_on_accelerators() -> None:
    """As in a loader: 16 numbers of rows at most. A processor takes any number."""
    assert times_of().pool.step == 512
    processor = profiles.Hardware.model_validate(truth())
    assert replace(times_of("train.precision=fp32"), hardware=processor).pool.step == 1


def test_windows_make_attention_linear() -> None:
    assert times_of("model.window=1024").work.quadratic < 0.05 * times_of().work.quadratic


def test_sparse_attention_has_the_share_of_its_stride() -> None:
    assert times_of(SPARSE).work.quadratic == pytest.approx(times_of().work.quadratic / 8, rel=0.01)


def test_a_document_length_of_the_run_does_not_cut_sequences() -> None:
    assert (
        times_of("data.attention_mask=document", "data.document_length=512").work
        == times_of("data.attention_mask=document").work
    )


def test_a_ring_hides_its_messages_under_attention_of_long_sequences() -> None:
    times = times_of()
    assert times.exposed("ring", 4096, 8) > 0
    assert times.exposed("ring", 262144, 8) == pytest.approx(times.work.returned * 262144 / 8)  # a gradient's last hop
    assert times.exposed("ulysses", 262144, 8) > times.exposed("ulysses", 4096, 8) > 0
    assert times.exposed("allgather", 262144, 1) == 0


def test_the_crossover_is_where_a_ring_exposes_less() -> None:
    times = times_of()
    length = times.crossover(8, 262144)
    assert length is not None
    assert times.exposed("ring", length, 8) < times.exposed("ulysses", length, 8)
    assert times.exposed("ring", length - 1024, 8) >= times.exposed("ulysses", length - 1024, 8)
    assert times.crossover(8, length - 1024) is None


def test_long_sequences_hide_more_of_their_offload() -> None:
    times = times_of()
    shares = [times.offloaded(length, 1) for length in (1024, 8192, 65536, 1048576)]
    assert shares == sorted(shares)
    slow = HARDWARE.device.model_copy(update={"host_bandwidth": 1e9})
    slower = replace(times, hardware=HARDWARE.model_copy(update={"device": slow}))
    assert 0 < slower.offloaded(8192, 1) < 1
    assert slower.offloaded(8192, 1) == pytest.approx(slower.offloaded(16384, 1), rel=0.7)
    unknown = HARDWARE.device.model_copy(update={"host_bandwidth": None})
    assert replace(times, hardware=HARDWARE.model_copy(update={"device": unknown})).offloaded(8192, 1) == 0


def test_seconds_of_attention_are_of_the_whole_stage() -> None:
    times = times_of()
    parts = StepParts(with_context(times.config, 8192), HARDWARE, STACK)
    assert times.parts.slowest_rank.attention == pytest.approx(
        sum(p.forward.attention + p.backward.attention for p in parts.pairs.values())
    )


@given(tokens=st.integers(1, 10**6), layers=st.integers(3, 100), share=st.floats(0, 1))
def test_ranks_with_offload_are_those_of_the_formula(tokens: int, layers: int, share: float) -> None:
    activation, held = tokens * 7.0, 8192 * 7.0
    expected = (2 * activation + (1 - share) * (layers - 2) * activation) / (layers * held)
    assert ranks_with_offload(tokens, 8192, layers, share) == pytest.approx(math.ceil(expected - 1e-9), abs=0)


def test_without_offload_a_sequence_takes_its_tokens_over_the_limit() -> None:
    assert ranks_with_offload(786432, 8192, 32, 0.0) == 96
    assert ranks_with_offload(786432, 8192, 32, 1.0) == 6
    assert ranks_with_offload(786432, 8192, 2, 1.0) == 96
