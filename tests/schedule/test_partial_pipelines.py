"""Partial pipelines: who skips what, and orders that are complete, without deadlocks, and close to the best."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.layout.stages import Placement, looped, placement_of
from megascale.plan.simulate.event_simulator import StageTimes, simulate
from megascale.plan.simulate.profiles import Overlaps
from megascale.schedule.check import check_schedule
from megascale.schedule.ir import (
    ScheduleError,
    build_schedule,
    forward,
    most_live,
)
from megascale.schedule.lower import compute_order, lower
from tests.schedule.test_lower import check_messages

RATIOS = st.sampled_from([0.1, 0.25, 0.3, 1 / 3, 0.5, 0.7, 0.9])


def partial(p: int, ratio: float) -> Placement:
    return placement_of("1f1b", p, 1, skip_ratio=ratio)


@given(p=st.integers(3, 12), m=st.integers(1, 40), ratio=RATIOS)
def test_inner_stages_are_skipped_equally_often(p: int, m: int, ratio: float) -> None:
    """By any number of micro-batches, which skip the share of them that the ratio says, rounded up."""
    placement = partial(p, ratio)
    skips = Counter(stage for i in range(m) for stage in set(range(p)) - set(placement.path(i)))
    assert not skips.keys() & {0, p - 1}
    counts = [skips[stage] for stage in range(1, p - 1)]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) - 1 < ratio * m * (p - 2) + 1e-3 * m * p and sum(counts) > ratio * m * (p - 2) - 1e-3 * m * p
    each = {p - len(placement.path(i)) for i in range(m)}
    assert max(each) - min(each) <= 1
    assert [placement.visits(stage, 0, m) for stage in range(1, p - 1)] == [m - count for count in counts]


def test_without_skips_nothing_changes() -> None:
    assert placement_of("1f1b", 4, 1, skip_ratio=0.0) is looped(4, 1)
    order = compute_order("1f1b", looped(4, 1), 6)
    assert order == build_schedule(SCHEDULES["1f1b"].load(), 4, 1, 6)


@given(p=st.integers(3, 8), m=st.integers(1, 20), ratio=RATIOS)
def test_orders_are_complete_and_without_deadlocks(p: int, m: int, ratio: float) -> None:
    """Messages meet at both ends, and as many micro-batches are live as the docstring says."""
    placement = partial(p, ratio)
    compute = compute_order("1f1b", placement, m)
    check_schedule(compute, placement, m)
    ahead = 2 if ratio <= 0.5 else math.ceil(1 / (1 - ratio))
    assert [most_live(order, [1]) for order in (compute[0], compute[-1])] == [min(m, ahead * (p - 1) + 1), 1]
    check_messages(lower(compute, placement), placement)


def test_an_action_of_a_skipped_stage_is_refused() -> None:
    placement = partial(3, 0.5)
    order = compute_order("1f1b", placement, 4)
    order = [order[0], [forward(0, 0), *order[1]], order[2]]
    with pytest.raises(ScheduleError, match=r"rank 1: F0\.0 is none of 1 chunks and 4 micro-batches on them"):
        check_schedule(order, placement, 4)


def makespan(placement: Placement, m: int) -> float:
    """Simulate m micro-batches whose forwards take `ticks`, backwards twice that, and messages no time."""
    times = {(stage, 0): float(ticks(placement, stage)) for stage in range(placement.p)}
    free = StageTimes(times, {place: 2 * took for place, took in times.items()}, 0.0, 0.0, {}, {})
    return simulate(compute_order("1f1b", placement, m), placement, free, Overlaps(tp="all", pp=True, dp=True)).last


def ticks(placement: Placement, stage: int) -> int:
    """The time of a forward, longer by what is skipped: ranks have equal work."""
    return (
        Fraction(1 - placement.skip_ratio).denominator
        if 0 < stage < placement.p - 1
        else Fraction(1 - placement.skip_ratio).numerator
    )


def best_makespan(placement: Placement, m: int) -> float:
    """Try all orders: of the actions of all micro-batches that can end first on a rank, each may be the next there
    (Giffler and Thompson 1960).
    """
    paths = [placement.path(i) for i in range(m)]
    one_way = [[(stage, ticks(placement, stage)) for stage in path] for path in paths]
    chains = [[*way, *((stage, 2 * took) for stage, took in reversed(way))] for way in one_way]
    least, seen = [10**9], dict[tuple[int, ...], list[tuple[int, ...]]]()

    def search(done: tuple[int, ...], times: tuple[int, ...]) -> None:
        """`times`: at which micro-batches and ranks are free."""
        left = [i for i in range(m) if done[i] < len(chains[i])]
        rest = {i: sum(took for _, took in chains[i][done[i] :]) for i in left}
        work = Counter[int]()
        for i in left:
            for rank, took in chains[i][done[i] :]:
                work[rank] += took
        bounds = [times[i] + rest[i] for i in left] + [times[m + rank] + work[rank] for rank in range(placement.p)]
        known = seen.setdefault(done, [])
        if max(bounds) >= least[0] or any(all(map(int.__le__, each, times)) for each in known):
            return
        known.append(times)
        if not left:
            least[0] = max(bounds)
        starts = {i: max(times[i], times[m + chains[i][done[i]][0]]) for i in left}
        ends = {i: starts[i] + chains[i][done[i]][1] for i in left}
        first = min(left, key=lambda i: ends[i], default=0)
        for i in (i for i in left if chains[i][done[i]][0] == chains[first][done[first]][0]):
            if starts[i] < ends[first]:
                rank, then = chains[i][done[i]][0], list(times)
                then[i] = then[m + rank] = ends[i]
                search((*done[:i], done[i] + 1, *done[i + 1 :]), tuple(then))

    search((0,) * m, (0,) * (m + placement.p))
    return least[0]


@pytest.mark.parametrize(
    ("p", "m", "ratio", "found", "best"),
    [(3, 3, 0.25, 44, 44), (3, 4, 0.5, 19, 17), (4, 3, 0.5, 18, 18), (4, 4, 0.5, 21, 21), (4, 3, 0.25, 55, 53),
     pytest.param(3, 5, 0.5, 21, 19, marks=pytest.mark.slow), pytest.param(4, 5, 0.5, 24, 24, marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_order_is_close_to_the_best(p: int, m: int, ratio: float, found: int, best: int) -> None:
    """Found by search, with any number of micro-batches live."""
    placement = partial(p, ratio)
    assert (makespan(placement, m), best_makespan(placement, m)) == (found, best)


@pytest.mark.parametrize(
    ("p", "ratio", "bubble"), [(4, 0.5, 9), (8, 0.5, 21), (8, 0.25, 21 + 2 / 3), (8, 0.1, 19 + 8 / 9), (8, 0.75, 25)]
)
def test_ranks_of_equal_work_are_idle_as_in_1f1b(p: int, ratio: float, bubble: float) -> None:
    """In units of a rank's mean forward, where 1F1B has 3 (p - 1)."""
    placement, m = partial(p, ratio), 32
    assert makespan(placement, m) / ticks(placement, 0) - 3 * m == pytest.approx(bubble)
