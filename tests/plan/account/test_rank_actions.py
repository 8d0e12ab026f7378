"""Few representative micro-batches show what many do, and posted receives have a bound."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.layout.stages import placement_of
from megascale.plan.account.rank_actions import posted_receives, representative_microbatches
from megascale.schedule import ir
from megascale.schedule.ir import SERVED, Action, Kind, RankSchedule
from megascale.schedule.lower import lower


@pytest.mark.parametrize("name", [name for name in SCHEDULES.names() if SCHEDULES[name].facts["v"] != 1])
@given(p=st.integers(1, 8), v=st.integers(1, 4), m=st.integers(1, 150))
@example(p=7, v=2, m=146)  # six large groups and fourteen small ones
@example(p=8, v=3, m=71)  # all groups but one are large
@settings(max_examples=12, deadline=None)
def test_representative_micro_batches_show_all_situations(name: str, p: int, v: int, m: int) -> None:
    v = SCHEDULES[name].facts["v"] or v
    few, many = (
        ir.build_schedule(SCHEDULES[name].load(), p, v, count) for count in (representative_microbatches(p, m), m)
    )
    assert [situations(order, v) for order in few] == [situations(order, v) for order in many]


def test_representative_micro_batches_are_few() -> None:
    assert representative_microbatches(8, 6144 + 5) == 8 * 8 + 4


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_posted_receives_have_a_bound(name: str) -> None:
    facts = SCHEDULES[name].facts
    chunks = (facts["v"],) if facts["v"] else (1, 2, 4)
    for p, v, m in itertools.product(range(2, 6), chunks, range(1, 14)):
        placement = placement_of(name, p, v)
        for rank, order in enumerate(lower(ir.build_schedule(SCHEDULES[name].load(), p, v, m), placement)):
            posted, most = set[Action](), 0
            for action in ir.each_action(order):
                if action.kind in (Kind.RECV_F, Kind.RECV_B):
                    posted.add(action._replace(kind=SERVED[action.kind]))
                elif action.kind in (Kind.F, Kind.B, Kind.I):
                    posted.discard(action if action.kind is Kind.F else action._replace(kind=Kind.B))
                    most = max(most, len(posted))
            assert most <= posted_receives(name, p, v, m, rank)


def situations(order: RankSchedule, v: int) -> set[tuple[object, ...]]:
    """Collect the numbers of live micro-batches by chunk, in a split backward until W, with the actions around."""
    live, seen = [0] * v, set()
    actions = [*ir.each_action(order)]
    kinds = [(action.kind, action.chunk) for action in actions]
    for index, action in enumerate(actions):
        seen.add((*live, *kinds[max(0, index - 2) : index + 3]))
        live[action.chunk] += {Kind.F: 1, Kind.I: 0}.get(action.kind, -1)
    return seen
