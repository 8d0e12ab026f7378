"""Steps of unequal sequences: a static mesh, hybrid, and chunks, in simulated pipelines."""

from __future__ import annotations

import random

import pytest

from megascale.layout.hybrid.sequence_work import SequenceWork
from megascale.plan.simulate.length_step import LengthStep, Pool, chunked_step, hybrid_step, static_step

WORK = SequenceWork(1.0, 0.001, sent=0.05)
LENGTHS = [6000, 2000, *[random.Random(3).randint(10, 900) for _ in range(200)]]


def sent_tokens(step: LengthStep) -> int:
    """Tokens whose keys and values all ranks together send in a layer's forward."""
    return sum((ranks - 1) * tokens for tokens, ranks in step.rings)


def test_a_static_mesh_splits_all_sequences() -> None:
    pool = Pool(8, 1000, WORK)
    step = static_step(LENGTHS, pool, 8)
    assert sent_tokens(step) == 7 * sum(LENGTHS)
    assert step.makespan >= sum(map(WORK.whole, LENGTHS)) / 8
    alone = static_step([500] * 16, pool, 1)
    assert sent_tokens(alone) == 0 and alone.makespan == pytest.approx(2 * WORK.whole(500))


def test_hybrid_is_faster_than_a_static_mesh() -> None:
    for stages in (1, 4):
        pool = Pool(8, 1000, WORK, stages)
        step, plan = hybrid_step(LENGTHS, pool)
        for balanced in (False, True):
            static = static_step(LENGTHS, pool, 8, balanced=balanced)
            assert step.makespan < static.makespan and sent_tokens(step) < sent_tokens(static)
        assert step.makespan >= plan.makespan >= plan.bound


@pytest.mark.parametrize("stages", [1, 4])
def test_padding_of_rows_counts_in_the_time_of_a_step(stages: int) -> None:
    """As a document of its own in each micro-batch, whose rows are a multiple of the step or the most of a rank."""
    exact, plan = hybrid_step(LENGTHS, Pool(8, 1000, WORK, stages))
    padded, same = hybrid_step(LENGTHS, Pool(8, 1000, WORK, stages, step=64))
    assert same == plan and exact.padding == 0
    assert padded.padding == sum(sum(plan.rows(rank, 64)) for rank in range(8)) - sum(LENGTHS) > 0
    assert exact.makespan < padded.makespan < exact.makespan * (1 + 64 / 500)
    if stages == 1:
        assert exact.makespan == pytest.approx(plan.makespan)


def test_packs_dealt_in_turn_are_slower_than_balanced_ones() -> None:
    pool = Pool(8, 2000, WORK)
    assert static_step(LENGTHS, pool, 4).makespan > static_step(LENGTHS, pool, 4, balanced=True).makespan


def test_the_planner_s_time_of_pipelines_is_close_to_the_simulation() -> None:
    pool = Pool(4, 1000, SequenceWork(1.0, 0.001), stages=4)
    lengths = [random.Random(5).randint(10, 1000) for _ in range(300)]
    step, plan = hybrid_step(lengths, pool)
    assert step.makespan == pytest.approx(plan.makespan, rel=0.1)


def test_equal_micro_batches_take_1f1b_s_time() -> None:
    pool = Pool(1, 100, SequenceWork(1.0, 0.0), stages=4)
    step, _ = hybrid_step([100] * 8, pool)
    assert step.makespan == pytest.approx((8 + 3) * 100)


def test_chunks_shorten_a_pipeline_of_a_long_sequence() -> None:
    """ChunkFlow's example: 1F1B of whole sequences takes 56 units, chunks of two units 42 with the longest first."""
    pool = Pool(1, 2, SequenceWork(3.0, 0.0), stages=4)
    assert pool.pipeline([12, 6, 3, 3], [4, 2, 1, 1]) == pytest.approx(56)
    assert chunked_step([1, 4, 2, 1], pool, 2, keep=2).makespan == pytest.approx(42)
    assert chunked_step([1, 4, 2, 1], pool, 2, keep=1).makespan == pytest.approx(44)


def test_chunks_of_a_sequence_stay_on_a_rank() -> None:
    pool = Pool(4, 100, SequenceWork(1.0, 0.0))
    step = chunked_step([800, 100, 100, 100, 100, 100, 100], pool, 100, keep=1)
    assert step.makespan == pytest.approx(800 + 700 / 3)
    assert step.microbatches == (2, 8)
