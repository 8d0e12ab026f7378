"""Batches of a ramp-up: those of Megatron-LM, and their sums by arithmetic."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from megascale.cli.check_summary import summary
from megascale.config.batch_rampup import BatchSizes, batch_sizes, full_batch_steps, samples_of_run
from megascale.config.run import RunConfig
from tests.runs import GPT, config_of, settings


@st.composite
def rampups(draw: st.DrawFn) -> BatchSizes:
    start, increment, levels = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 12))
    return BatchSizes(start + increment * levels, start, increment, draw(st.integers(1, 2000)))


@given(rampups(), st.lists(st.integers(0, 3000), max_size=20))
def test_sizes_are_those_of_megatron_core(sizes: BatchSizes, moments: list[int]) -> None:
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    given = sizes.start, sizes.increment, sizes.samples
    theirs = RampupBatchsizeNumMicroBatchesCalculator(sizes.total, 1, 1, False, 1, *given)
    for consumed in moments:
        if consumed * sizes.levels % sizes.samples == 0 and consumed < sizes.samples:
            continue  # their quotient of floats may round to either side of a whole number
        theirs.update(consumed, consistency_check=True)
        assert sizes.at(consumed) == theirs.get_current_global_batch_size()


@given(rampups(), st.integers(0, 400))
def test_samples_before_a_step_are_the_sum_of_the_batches(sizes: BatchSizes, steps: int) -> None:
    consumed = before = 0
    for step in range(steps):
        consumed += sizes.at(consumed)
        before = consumed if step < steps // 3 else before
    assert sizes.before_step(steps + 1) == sizes.after_steps(before, steps - steps // 3) == consumed
    assert sizes.at(0) == sizes.start and sizes.at(max(consumed, sizes.samples)) == sizes.total


def test_without_a_rampup_all_batches_are_equal(tmp_path: Path) -> None:
    plain = config_of(settings(GPT, tmp_path), tmp_path)
    assert [batch_sizes(plain.batch).at(consumed) for consumed in (0, 5, 80)] == [8, 8, 8]
    assert _counts(plain) == (80, 10, 8)
    ramped = config_of(settings(GPT, tmp_path, batch__rampup=[2, 2, 12]), tmp_path)
    samples = 2 + 2 + 4 + 6 + 6 * 8 - 6 + 6  # 2 2 4 6 and six of 8
    assert _counts(ramped) == (samples, samples // 8, 2)
    assert "128 tokens per step after the ramp-up" in summary(ramped)


def _counts(config: RunConfig) -> tuple[int, int, int]:
    """Samples of a run, as steps of a full batch, and what divides every batch."""
    of_run = config.batch, config.train
    return samples_of_run(*of_run), full_batch_steps(*of_run), batch_sizes(config.batch).common
