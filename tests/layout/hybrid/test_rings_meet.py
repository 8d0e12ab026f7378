"""Ranks of a ring meet on every pipeline stage: all stages of all ranks run their 1F1B orders, and rings wait for all
of their ranks.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.layout.hybrid.plan import HybridPlan, PlannedBatch
from megascale.layout.hybrid.planner import plan_hybrid
from megascale.layout.hybrid.sequence_work import SequenceWork
from megascale.layout.stages import looped
from megascale.schedule.dependencies import Result, dependencies, results
from megascale.schedule.ir import Action, build_schedule
from megascale.schedule.one_f_one_b import one_f_one_b
from tests.layout.hybrid.plan_check import check_plan


def stuck(plan: HybridPlan, stages: int) -> list[tuple[int, int, Action]]:
    """Run all actions; return (rank, stage, action) of those that wait for each other."""
    orders = [build_schedule(one_f_one_b, stages, 1, len(own)) for own in plan.microbatches]
    position = [[0] * stages for _ in orders]
    done, placement = [set[Result]() for _ in orders], looped(stages, 1)

    def ready(rank: int, stage: int) -> Action | None:
        order = orders[rank][stage]
        action = order[position[rank][stage]] if position[rank][stage] < len(order) else None
        met = action is not None and done[rank].issuperset(dependencies(action, stage, placement))
        return action if met else None

    progress = True
    while progress:
        progress = False
        for rank, own in enumerate(plan.microbatches):
            for stage in range(stages):
                while (action := ready(rank, stage)) is not None:
                    batch = own[action.microbatch]
                    members = range(batch.first, batch.first + batch.ranks)
                    if any(ready(member, stage) != action for member in members):
                        break
                    for member in members:
                        done[member].update(results(action, stage, placement))
                        position[member][stage] += 1
                    progress = True
    return [
        (rank, stage, order[at])
        for rank, own in enumerate(orders)
        for stage, order in enumerate(own)
        if (at := position[rank][stage]) < len(order)
    ]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=40), pool=st.integers(9, 14), stages=st.integers(1, 5)
)
def test_rings_meet_on_all_stages(lengths: list[int], pool: int, stages: int) -> None:
    plan = plan_hybrid(lengths, pool, 100, SequenceWork(1.0, 0.01), stages)
    check_plan(plan)
    assert stuck(plan, stages) == []


def test_rings_at_different_indices_do_not() -> None:
    """Rank 0 has a pack between its rings, rank 1 does not: backward and forward wait for each other."""
    first, second, pack = PlannedBatch((0,), 0, 2), PlannedBatch((1,), 0, 2), PlannedBatch((2,), 0)
    plan = HybridPlan((150, 150, 50), 100, "dp", ((first, second, pack), (first, second)), 1.0, 1.0)
    assert stuck(plan, 2) == []
    moved = replace(plan, microbatches=((first, pack, second), (first, second)))
    assert stuck(moved, 2)
