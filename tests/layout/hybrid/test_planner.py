"""Plans of hybrid data parallelism: every token once, limits, determinism, and the time of a step against its bound."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megascale.core.errors import DataError
from megascale.layout.hybrid.plan import HybridPlan, PlannedBatch, ring_parts, row_step, with_padding
from megascale.layout.hybrid.planner import makespan_bound, plan_hybrid
from megascale.layout.hybrid.sequence_work import SequenceWork
from tests.layout.hybrid.plan_check import check_plan

WORK = SequenceWork(linear=6 * 8e9, quadratic=6 * 32 * 4096)
"""FLOPs per token of Llama 3 8B, and of its causal attention per square token."""

lengths_of_a_step = st.lists(st.integers(1, 800), min_size=1, max_size=40)


def long_tailed(count: int, *, median: float, sigma: float, longest: int, seed: int) -> list[int]:
    """Draw lengths: most are short, a few a thousand times as long."""
    draw = random.Random(seed)
    return [min(longest, max(1, int(draw.lognormvariate(math.log(median), sigma)))) for _ in range(count)]


@given(max_tokens=st.integers(1, 1 << 20), tokens=st.integers(1, 1 << 22), ranks=st.integers(1, 64))
def test_ranks_have_few_numbers_of_rows(max_tokens: int, tokens: int, ranks: int) -> None:
    step, tokens = row_step(max_tokens), min(tokens, ranks * max_tokens)
    total = with_padding(tokens, ranks, step, max_tokens)
    rows, of_ranks = divmod(total, ranks)
    assert of_ranks == 0 and tokens <= total < tokens + ranks * step
    assert rows in {*range(step, max_tokens, step), max_tokens} and -(-max_tokens // step) <= 16
    assert with_padding(tokens, ranks, 1, max_tokens) == tokens


@example(lengths=[1], pool=9, stages=4)  # rounded sums of a search for the makespan
@settings(max_examples=60)
@given(lengths=lengths_of_a_step, pool=st.integers(8, 20), stages=st.integers(1, 4))
def test_every_token_is_trained_on_once_within_the_limit(lengths: list[int], pool: int, stages: int) -> None:
    plan = plan_hybrid(lengths, pool, 100, SequenceWork(1.0, 0.01), stages)
    check_plan(plan)
    assert sum(sum(plan.rows(rank)) for rank in range(len(plan.microbatches))) == sum(lengths)
    assert plan.makespan >= plan.bound * (1 - 1e-9)


@settings(max_examples=30)
@given(lengths=lengths_of_a_step, pool=st.integers(8, 20))
def test_messages_count_in_the_choice_of_rings(lengths: list[int], pool: int) -> None:
    check_plan(plan_hybrid(lengths, pool, 100, SequenceWork(1.0, 0.01, sent=3.0, latency=10.0), 2))


@pytest.mark.parametrize("pool", [5, 8, 16])
def test_a_ring_has_at_most_a_rank_for_each_token(pool: int) -> None:
    """Where messages cost nothing, more ranks always seem faster."""
    for lengths in ([6], [6, 2, 7], [4, 4, 4]):
        plan = plan_hybrid(lengths, pool, 3, SequenceWork(1.0, 0.01), 1)
        check_plan(plan)
        assert all(ring.ranks <= lengths[ring.sequences[0]] for ring in plan.rings)


@settings(max_examples=30)
@given(lengths=lengths_of_a_step, pool=st.integers(8, 20))
def test_plans_are_equal_on_all_ranks(lengths: list[int], pool: int) -> None:
    first, second = (plan_hybrid(lengths, pool, 100, WORK, 2) for _ in range(2))
    assert first == second


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40), pool=st.integers(1, 9))
def test_short_sequences_have_no_context_communication(lengths: list[int], pool: int) -> None:
    plan = plan_hybrid(lengths, pool, 100, WORK)
    assert not plan.rings


@given(length=st.integers(1, 3000), ranks=st.integers(1, 30))
def test_parts_of_a_ring_are_the_sequence_with_equal_work(length: int, ranks: int) -> None:
    parts = ring_parts(length, ranks)
    ranges = sorted(part for own in parts for part in own)
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == length
    tokens = [sum(stop - start for start, stop in own) for own in parts]
    assert max(tokens) - min(tokens) <= 1
    if length >= 100 * ranks:
        scores = [sum(stop * stop - start * start for start, stop in own) for own in parts]
        assert max(scores) <= 1.1 * sum(scores) / ranks


SETTINGS = {  # sequences, pool, tokens per rank, median, sigma, longest
    "7b at 256K": (1024, 64, 32768, 2000, 2.0, 262144),
    "2M on 256 ranks": (1024, 256, 8192, 2000, 2.2, 2097152),
    "mostly below 1K": (2048, 32, 8192, 600, 1.7, 262144),
    "96 ranks": (1000, 96, 8192, 1000, 2.0, 786432),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(2))
def test_long_tailed_steps_are_close_to_the_bound(setting: str, seed: int) -> None:
    count, pool, limit, median, sigma, longest = SETTINGS[setting]
    lengths = long_tailed(count, median=median, sigma=sigma, longest=longest, seed=seed)
    plan = plan_hybrid(lengths, pool, limit, WORK)
    check_plan(plan)
    assert any(length > limit for length in lengths)
    assert plan.makespan <= 1.1 * plan.bound


def test_a_pipeline_with_many_micro_batches_is_close_to_the_bound() -> None:
    lengths = long_tailed(2048, median=2000, sigma=2.0, longest=262144, seed=0)
    plan = plan_hybrid(lengths, 32, 8192, WORK, stages=4)
    check_plan(plan)
    assert min(map(len, plan.microbatches)) > 60
    assert plan.makespan <= 1.1 * plan.bound


def test_768k_tokens_take_96_ranks() -> None:
    plan = plan_hybrid([786432, *[100] * 2700], 128, 8192, SequenceWork(1.0, 0.0))
    assert [(ring.ranks, ring.sequences) for ring in plan.rings] == [(96, (0,))]
    assert plan.rows(0)[0] == 8192


def test_rings_wider_than_memory_asks_for_if_attention_dominates() -> None:
    """A sequence has most of the step's work: on the two ranks that it needs, the step takes four times as long."""
    lengths = [200, *[10] * 20]
    work = SequenceWork(0.01, 1.0)
    plan = plan_hybrid(lengths, 8, 100, work)
    assert [ring.ranks for ring in plan.rings] == [8]
    assert plan.makespan <= 1.1 * plan.bound
    costly = plan_hybrid(lengths, 8, 100, replace(work, sent=1000.0))
    assert costly.rings[0].ranks < 8  # messages that take longer than the attention they save


def test_pipelines_with_shorter_micro_batches_have_more_of_them() -> None:
    lengths = [1000] * 8 + [100] * 400
    plan = plan_hybrid(lengths, 4, 1000, SequenceWork(1.0, 0.01), stages=8)
    check_plan(plan)
    assert plan.balance == "pp"
    counts = [len(batches) for batches in plan.microbatches]
    longest = [max(max(lengths[i] for i in batch.sequences) for batch in own) for own in plan.microbatches]
    assert longest == sorted(longest, reverse=True) and longest[0] > longest[-1]
    assert counts[0] < counts[-1]
    mixed = plan_hybrid(lengths, 4, 1000, SequenceWork(1.0, 0.01), stages=1)
    assert mixed.balance == "dp"


def test_the_bound_counts_the_longest_sequence_on_every_stage() -> None:
    work = SequenceWork(1.0, 0.0)
    assert makespan_bound([100, 10, 10], 2, 100, work) == 100  # fits a rank, and stays there
    assert makespan_bound([100, 10, 10], 2, 50, work) == 60  # is split
    assert makespan_bound([100, 10, 10], 2, 50, work, stages=3) == 60 + 2 * 50


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([10, 401], "sequence 1 has 401 tokens, 4 ranks hold 400  -> use 5 ranks, or more tokens per rank"),
        ([10, 0], "sequence 1 has 0 tokens"),
        ([], "the step has no sequences"),
    ],
)
def test_steps_that_cannot_be_planned_say_why(lengths: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        plan_hybrid(lengths, 4, 100, WORK)


def broken(plan: HybridPlan, batches: list[list[PlannedBatch]]) -> HybridPlan:
    return replace(plan, microbatches=tuple(map(tuple, batches)))


def test_the_check_finds_what_a_plan_must_not_do() -> None:
    plan = plan_hybrid([250, 40, 30], 3, 100, SequenceWork(1.0, 0.0))
    check_plan(plan)
    own = [list(batches) for batches in plan.microbatches]
    with pytest.raises(ValueError, match="each once"):
        check_plan(broken(plan, [batches[:1] for batches in own]))
    with pytest.raises(ValueError, match="not the ring of rank"):
        check_plan(broken(plan, [own[0], own[1][::-1] if len(own[1]) > 1 else own[1][1:], own[2]]))
    with pytest.raises(ValueError, match="fits a rank, and is in a ring"):
        check_plan(replace(plan, max_tokens=250))
    with pytest.raises(ValueError, match="the limit is 80"):
        check_plan(replace(plan, max_tokens=80))
