"""Gathers of sharded weights: before every use and released after it, in one order for any schedule."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest

from megascale.catalog.schedules import SCHEDULES
from megascale.layout.stages import looped
from megascale.schedule.interleaved import interleaved_1f1b
from megascale.schedule.ir import Kind, build_schedule, each_action
from megascale.schedule.lower import lower
from megascale.schedule.one_f_one_b import one_f_one_b
from megascale.schedule.resharding import GATHERS, Reshard, count_gathers
from tests.schedule.hosts import check_messages, computed
from tests.schedule.orders import schedule_of

MODES: tuple[Reshard, ...] = ("keep", "microbatch", "forward")
NAMES = [name for name in SCHEDULES.names() if not SCHEDULES[name].facts.get("pairs")]
BRACKETS = (Kind.GATHER_F, Kind.GATHER_B, Kind.RELEASE)


@pytest.mark.parametrize("reshard", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_there_for_every_use(name: str, reshard: Reshard) -> None:
    """Every forward, and every backward but W, of a chunk has its weights; at the end none are left."""
    facts = SCHEDULES[name].facts
    for p, v, m in ((1, 1, 3), (2, facts["v"] or 1, 5), (3, facts["v"] or 2, 6)):
        compute, placement = schedule_of(name, p, v, m)
        lowered = lower(compute, placement, reduce_each=True, reshard=reshard)
        check_messages([[each for each in order if each.kind not in BRACKETS] for order in lowered], placement)
        for order, own in zip(lowered, compute, strict=True):
            assert computed([action for action in order if action.kind not in BRACKETS]) == own
            held = [0] * placement.v
            for action in each_action(order):
                held[action.chunk] += {Kind.GATHER_F: 1, Kind.GATHER_B: 1, Kind.RELEASE: -1}.get(action.kind, 0)
                assert held[action.chunk] >= (action.kind in GATHERS)
                if reshard == "microbatch":
                    assert sum(held) <= 1, "one chunk at a time"
            assert held == [0] * placement.v


def test_a_gather_is_announced_an_action_ahead() -> None:
    """With "forward": the next unit sets out before the reduction of the last one."""
    (order,) = lower(build_schedule(one_f_one_b, 1, 1, 2), looped(1, 1), reduce_each=True, reshard="forward")
    assert " ".join(map(str, order)) == (
        "GATHER_F0.0 GATHER_B0.0 WAIT_PARAMS0.0 F0.0 RELEASE0.0 GATHER_F0.1 B0.0 RELEASE0.0 REDUCE0.0 "
        "GATHER_B0.1 WAIT_PARAMS0.1 F0.1 RELEASE0.1 B0.1 RELEASE0.1 REDUCE0.1"
    )


def test_chunks_are_kept_for_the_step() -> None:
    first, _ = lower(build_schedule(interleaved_1f1b, 2, 2, 2), looped(2, 2), reshard="keep")
    kinds = [action for action in each_action(first) if action.kind in BRACKETS]
    assert " ".join(map(str, kinds)) == "GATHER_F0.0 GATHER_F1.0 RELEASE1.1 RELEASE0.1"


@pytest.mark.parametrize("reshard", MODES)
def test_counts_of_gathers(reshard: Reshard) -> None:
    """The last unit of a forward is the first of the backward after it."""
    (order,) = build_schedule(one_f_one_b, 1, 1, 4)
    assert count_gathers(order, reshard, 0, 3) == ([5, 8, 4] if reshard == "forward" else [1, 1, 1])
    order, _ = build_schedule(interleaved_1f1b, 2, 2, 4)
    runs = 1 + sum(a.chunk != b.chunk for a, b in pairwise(order))
    counts = list(chain(*(count_gathers(order, reshard, chunk, 2) for chunk in range(2))))
    assert sum(counts) == {"keep": 4, "microbatch": 2 * runs, "forward": sum(counts)}[reshard]
