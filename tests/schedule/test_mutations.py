"""Mutated schedules: the check refuses each that cannot run, and no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megascale.catalog.schedules import SCHEDULES
from megascale.layout.stages import Placement
from megascale.schedule.check import check_schedule
from megascale.schedule.dependencies import Result, dependencies, results
from megascale.schedule.ir import Kind, Overlap, RankSchedule, Schedule, ScheduleError, each_action, most_live
from megascale.schedule.lower import lower
from tests.schedule.hosts import RECEIVES, SENDS, check_messages
from tests.schedule.orders import schedule_of

P, M = 3, 5


def removed_or_repeated(order: RankSchedule) -> Iterator[RankSchedule]:
    for at, entry in enumerate(order):
        yield order[:at] + order[at + 1 :]
        yield [*order[:at], entry, *order[at:]]


def swapped(order: RankSchedule) -> Iterator[RankSchedule]:
    """Swap entries that are up to six apart."""
    for one in range(len(order)):
        for other in range(one + 1, min(one + 7, len(order))):
            changed = list(order)
            changed[one], changed[other] = order[other], order[one]
            yield changed


def accepted(compute: Schedule, placement: Placement, peak: int) -> bool:
    try:
        check_schedule(compute, placement, M, {"peak": lambda p, v, m: peak, "split": True, "pairs": True})
    except ScheduleError:
        return False
    return True


def runs(compute: Schedule, placement: Placement) -> bool:
    """Run a schedule: every entry once what it needs is there, and nothing is made twice or never."""
    left, done = [order[::-1] for order in compute], set[Result]()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(left):
            while order and done.issuperset(dependencies(order[-1], rank, placement)):
                made = results(order.pop(), rank, placement)
                if not done.isdisjoint(made):
                    return False
                done.update(made)
                moved = True
    return not any(left) and len(done) == 3 * placement.count * M


def sums_ascend(compute: Schedule) -> bool:
    for order in compute:
        sums = [(a.chunk, a.microbatch) for a in each_action(order) if a.kind in (Kind.B, Kind.W)]
        if sorted(sums, key=lambda key: key[0]) != sorted(sums):
            return False
    return True


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_removed_and_repeated_actions_are_refused(name: str) -> None:
    compute, placement = schedule_of(name, P, 2, M)
    for rank, order in enumerate(compute):
        for changed in removed_or_repeated(order):
            assert not accepted([*compute[:rank], changed, *compute[rank + 1 :]], placement, peak=P * M)


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_swapped_actions_are_refused_unless_they_run(name: str) -> None:
    """Two swapped actions that do not need each other are another schedule."""
    compute, placement = schedule_of(name, P, 2, M)
    peak = SCHEDULES[name].facts["peak"](P, placement.v, M)
    assert runs(compute, placement) and sums_ascend(compute)
    refused = 0
    for rank, order in enumerate(compute):
        for changed in swapped(order):
            mutant = [*compute[:rank], changed, *compute[rank + 1 :]]
            valid = runs(mutant, placement) and sums_ascend(mutant) and most_live(changed, [1] * placement.v) <= peak
            assert accepted(mutant, placement, peak) == valid, f"rank {rank}: {' '.join(map(str, changed))}"
            refused += not valid
    assert refused > 20


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_mutated_messages_are_found(name: str) -> None:
    """A SEND or a RECV that is missing, repeated, or behind the next of its channel."""
    compute, placement = schedule_of(name, P, 2, M)
    lowered = lower(compute, placement)
    for rank, order in enumerate(lowered):
        following = dict[tuple[Kind, int], int]()
        for at, entry in reversed([*enumerate(order)]):
            if isinstance(entry, Overlap) or entry.kind not in (*SENDS, *RECEIVES):
                continue
            mutants = [order[:at] + order[at + 1 :], [*order[:at], entry, *order[at:]]]
            if (later := following.get(entry[:2])) is not None:
                mutants.append([*order[:at], order[later], *order[at + 1 : later], entry, *order[later + 1 :]])
            following[entry[:2]] = at
            for mutant in mutants:
                with pytest.raises(AssertionError):
                    check_messages([*lowered[:rank], mutant, *lowered[rank + 1 :]], placement)
