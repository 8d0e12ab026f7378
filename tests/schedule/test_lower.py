"""Lowering: every message has two ends, in one global order, so that no waits for devices deadlock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from graphlib import CycleError
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.receive_orders import posted_ahead
from megascale.catalog.schedules import SCHEDULES
from megascale.layout.stages import looped, v_shaped
from megascale.schedule.interleaved import combined_1f1b, interleaved_1f1b
from megascale.schedule.ir import (
    SERVED,
    Action,
    Kind,
    Overlap,
    ScheduleError,
    backward,
    build_schedule,
    each_action,
    forward,
    forwards_only,
)
from megascale.schedule.lower import lower
from megascale.schedule.one_f_one_b import one_f_one_b
from megascale.schedule.state_aware import build_state_aware
from megascale.schedule.zero_bubble import interleaved_zb
from tests.marks import only_quick_rows
from tests.schedule.hosts import RECEIVES, SENDS, check_messages, computed, ends, places
from tests.schedule.orders import any_order, schedule_of

SEEDS = st.randoms(use_true_random=False)


@pytest.mark.parametrize("name", SCHEDULES.names())
@pytest.mark.parametrize(
    ("ranks", "chunks", "micro_batches"),
    [
        ((1, 2, 3, 5), (1, 3), (1, 2, 5, 7)),
        pytest.param(range(1, 7), range(1, 5), range(1, 14), marks=pytest.mark.slow),
    ],
)
def test_no_waits_deadlock(
    name: str, ranks: Iterable[int], chunks: Iterable[int], micro_batches: Iterable[int]
) -> None:
    """In training and evaluation: by the graph, and by hosts that wait before every action."""
    facts = SCHEDULES[name].facts
    chunks = (facts["v"],) if facts["v"] else chunks
    for p, v, m in product(ranks, chunks, micro_batches):
        compute, placement = schedule_of(name, p, v, m)
        lowered = lower(compute, placement, reduce_each=True)
        check_messages(lowered, placement)
        assert ends(lowered, placement, places(lowered))
        check_messages(lower(forwards_only(compute), placement, training=False), placement)


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(p=st.integers(2, 4), v=st.integers(1, 2), m=st.integers(1, 8), chance=SEEDS)
@settings(max_examples=3, deadline=None)
def test_no_waits_deadlock_with_experts(name: str, p: int, v: int, m: int, chance: random.Random) -> None:
    """Any host of two pipelines that exchange experts may wait, while receives of its peers occupy their devices."""
    compute, placement = schedule_of(name, p, v, m)
    lowered = lower(compute, placement)
    every = sorted(places(lowered))
    for share in (0.3, 0.7):
        assert ends(lowered, placement, *({place for place in every if chance.random() < share} for _ in range(2)))


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(p=st.integers(7, 16), v=st.integers(1, 4), m=st.integers(1, 40))
@settings(max_examples=2, deadline=None)
def test_no_waits_deadlock_in_large_pipelines(name: str, p: int, v: int, m: int) -> None:
    compute, placement = schedule_of(name, p, v, m)
    check_messages(lower(compute, placement), placement)


@given(
    p=st.integers(1, 6), sequences=st.lists(st.integers(1, 7), min_size=1, max_size=8), keep=st.integers(1, 4),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_no_waits_deadlock_with_chunks_of_sequences(p: int, sequences: list[int], keep: int) -> None:
    lowered = lower(build_state_aware(p, sequences, keep), looped(p, 1))
    check_messages(lowered, looped(p, 1))
    assert ends(lowered, looped(p, 1), places(lowered))


@given(
    p=st.integers(1, 5),
    v=st.integers(1, 3),
    m=st.integers(1, 4),
    turns=st.booleans(),
    split=st.booleans(),
    chance=SEEDS,
)
@settings(max_examples=60, deadline=None)
def test_no_waits_deadlock_in_random_orders(
    p: int, v: int, m: int, turns: bool, split: bool, chance: random.Random
) -> None:
    """Also with stages in a V, and with split backwards."""
    placement = v_shaped(p, 2) if turns else looped(p, v)
    compute = any_order(placement, m, chance, split=split)
    for lowered in (lower(compute, placement), lower(forwards_only(compute), placement, training=False)):
        check_messages(lowered, placement)


@pytest.mark.parametrize("name", [*SCHEDULES.names(), "any"])
@given(p=st.integers(2, 4), v=st.integers(1, 3), m=st.integers(1, 6), chance=SEEDS)
@settings(max_examples=2, deadline=None)
def test_simulated_hosts_that_wait_finish(name: str, p: int, v: int, m: int, chance: random.Random) -> None:
    """All hosts before every action, and before any set of them."""
    compute, placement = (
        (any_order(looped(p, v), m, chance), looped(p, v)) if name == "any" else schedule_of(name, p, v, m)
    )
    lowered = lower(compute, placement)
    every = places(lowered)
    assert ends(lowered, placement, every)
    for _ in range(5):
        assert ends(lowered, placement, {place for place in every if chance.random() < 0.3})


def consumer(receive: Action) -> Action:
    """The action that needs a message."""
    return receive._replace(kind=SERVED[receive.kind])


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize(("p", "v", "m"), only_quick_rows([(2, 2, 8), (4, 2, 8), (8, 6, 16)], (2, 2, 8), (4, 2, 8)))
def test_receives_posted_ahead_would_deadlock(name: str, p: int, v: int, m: int, ahead: int) -> None:
    """Both judges find it, when all hosts wait before every action."""
    compute, placement = schedule_of(name, p, v, m)
    lowered = [posted_ahead(order, ahead) for order in lower(compute, placement)]
    assert ends(lowered, placement, set())
    assert not ends(lowered, placement, places(lowered))
    with pytest.raises(CycleError):
        check_messages(lowered, placement)


def test_receives_out_of_order_are_found() -> None:
    placement = looped(2, 1)
    lowered = lower(build_schedule(one_f_one_b, 2, 1, 3), placement)
    first, second = [at for at, action in enumerate(lowered[1]) if action.kind is Kind.RECV_F][:2]
    lowered[1][first], lowered[1][second] = lowered[1][second], lowered[1][first]
    with pytest.raises(AssertionError, match="not in the order"):
        check_messages(lowered, placement)


def test_ranks_that_wait_for_each_other_are_refused() -> None:
    stuck = [[backward(0, 0), forward(0, 0)], [forward(0, 0), backward(0, 0)]]
    with pytest.raises(ScheduleError, match=r"deadlocks: rank 0 at B0\.0, rank 1 at F0\.0"):
        lower(stuck, looped(2, 1))


@pytest.mark.parametrize("training", [True, False])
def test_pipelines_with_fewer_micro_batches_run_in_the_same_order(training: bool) -> None:
    """Pipelines whose ranks meet in rings have different numbers of micro-batches. Each one's order is the part of the
    longest one's, so that all of them have one global order.
    """
    for p in range(1, 7):
        lists = {}
        for m in range(1, 13):
            compute = build_schedule(one_f_one_b, p, 1, m)
            lists[m] = lower(compute if training else forwards_only(compute), looped(p, 1), training=False)
        for m in range(1, 12):
            assert lists[m] == [[action for action in order if action.microbatch < m] for order in lists[12]]


def test_receives_are_posted_while_the_action_before_runs() -> None:
    """In the steady state of 1F1B a message of either direction overlaps with an action of its receiver."""
    lowered = lower(build_schedule(one_f_one_b, 4, 1, 24), looped(4, 1))
    for rank, order in enumerate(lowered):
        ahead = Counter[int]()
        for at, action in enumerate(order):
            if action.kind in RECEIVES and 8 <= action.microbatch < 16:
                between = order[at : order.index(consumer(action))]
                ahead[sum(each.kind in (Kind.F, Kind.B) for each in between)] += 1
        assert ahead.total() == (8 if rank in (0, 3) else 16)
        assert rank in (0, 3) or ahead[1] >= 8, ahead


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(p=st.integers(1, 6), v=st.integers(1, 4), m=st.integers(1, 12), each=st.booleans())
@settings(max_examples=8, deadline=None)
def test_only_communication_is_added(name: str, p: int, v: int, m: int, each: bool) -> None:
    """Every boundary is sent once; a chunk's weights are waited for before its first forward, and its gradients reduced
    after its last backward, or after each.
    """
    compute, placement = schedule_of(name, p, v, m)
    lowered = lower(compute, placement, reduce_each=each)
    counts = Counter(action.kind for order in lowered for action in each_action(order))
    boundaries = m * sum(one != other for (one, _), (other, _) in pairwise(placement.places))
    assert {counts[kind] for kind in (*SENDS, *RECEIVES)} == {boundaries}
    for order, own in zip(lowered, compute, strict=True):
        assert computed(order) == own
        for chunk in range(placement.v):
            kinds = [
                action.kind
                for action in each_action(order)
                if action.chunk == chunk and action.kind not in (*SENDS, *RECEIVES)
            ]
            assert kinds[0] is Kind.WAIT_PARAMS and kinds.count(Kind.WAIT_PARAMS) == 1
            assert (
                kinds[-2] in (Kind.B, Kind.W)
                and kinds[-1] is Kind.REDUCE
                and kinds.count(Kind.REDUCE) == (m if each else 1)
            )


def test_reductions_follow_the_last_gradients_of_the_weights() -> None:
    lowered = lower(build_schedule(interleaved_zb, 3, 1, 5), looped(3, 1))
    for order in lowered:
        own = [action for action in order if action.kind in (Kind.I, Kind.W, Kind.REDUCE)]
        assert [action.kind for action in own[-2:]] == [Kind.W, Kind.REDUCE]
        assert sum(action.kind is Kind.REDUCE for action in own) == 1


def test_interleaving_lowers_as_drawn() -> None:
    first, second = lower(build_schedule(interleaved_1f1b, 2, 2, 2), looped(2, 2))
    assert " ".join(map(str, first[:7])) == "WAIT_PARAMS0.0 F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_F1.0 RECV_F1.1"
    assert " ".join(map(str, second[:5])) == "RECV_F0.0 RECV_F0.1 WAIT_PARAMS0.0 F0.0 SEND_F0.0"


def test_pairs_lower_as_one_action() -> None:
    """Receives of both parts come before, sends of both after, then reductions."""
    placement = looped(2, 2)
    _, last = lower(build_schedule(combined_1f1b, 2, 2, 4), placement, reduce_each=True)
    start = last.index(Overlap(forward(0, 3), backward(0, 0)))
    assert " ".join(map(str, last[start : start + 4])) == "F0.3&B0.0 SEND_F0.3 SEND_B0.0 REDUCE0.0"
    for receive in (Action(Kind.RECV_F, 0, 3), Action(Kind.RECV_B, 0, 0)):
        assert receive in last[:start]
