"""The clock offsets of hosts against rank 0's."""

from __future__ import annotations

import time
from typing import Any

import pytest

from megascale.core.rank import Rank
from tests.worlds import run_world

WITHIN = 0.05
"""Largest error of a measurement in seconds: more than half of the shortest round trip on a busy machine, and less than
a late rank would cause.
"""

Measured = tuple[float, float]
"""This rank's time, and seconds by which rank 0's clock is ahead."""

Clocks = list[tuple[str, float]]
"""By rank, its host and the seconds by which its clock is ahead of this machine's."""


def measure(rank: Rank, labels: dict[str, Clocks], late: dict[str, float]) -> list[Measured]:
    """Measure once per label, in order. `late`: seconds by which the ranks of a host are late."""
    from torch.distributed.distributed_c10d import _get_default_store

    from megascale.comm import clock
    from megascale.comm.group import Group

    world, found = Group("world", tuple(range(rank.world_size)), rank.rank), []
    for label, clocks in labels.items():
        host, ahead = clocks[rank.rank]

        def now(ahead: float = ahead) -> float:
            return time.perf_counter() + ahead

        time.sleep(late.get(host, 0.0))
        before = now()
        found.append(clock.clock_offset(world, _get_default_store(), label, host, now))
        assert before <= found[-1][0] <= now(), "the time is the rank's own"
    return found


def assert_measured(found: list[Measured], clocks: Clocks) -> None:
    first = clocks[0]
    for (_, offset), (host, ahead) in zip(found, clocks, strict=True):
        assert offset == pytest.approx(first[1] - ahead, abs=WITHIN)
        assert offset == 0 or host != first[0], "ranks of rank 0's host have its clock"
    for host in {host for host, _ in clocks}:
        assert len({offset for (_, offset), clock in zip(found, clocks, strict=True) if clock[0] == host}) == 1


APART: Clocks = [("a", 0.0), ("b", 2.0), ("b", 2.0), ("c", -2.0)]
FURTHER: Clocks = [("a", 0.5), ("b", -1.0), ("b", -1.0), ("c", 2.0)]


@pytest.mark.parametrize("late", [{}, {"a": 0.2}, {"b": 0.2}], ids=str)
def test_hosts_measure_how_far_they_are_apart(late: dict[str, float]) -> None:
    labels = {"start": APART, "end": FURTHER}
    for label, found in zip(labels.values(), zip(*run_world(4, measure, labels, late), strict=True), strict=True):
        assert_measured(list(found), label)


def test_hosts_whose_ranks_are_not_neighbours() -> None:
    clocks: Clocks = [("a", 1.0), ("b", 2.0), ("a", 1.0), ("b", 2.0)]
    found = [measured for (measured,) in run_world(4, measure, {"start": clocks}, {})]
    assert_measured(found, clocks)
    assert [offset == 0 for _, offset in found] == [True, False, True, False]


def test_one_host_needs_no_measurement() -> None:
    clocks: Clocks = [("a", 3.0), ("a", 3.0)]
    assert [measured[1] for (measured,) in run_world(2, measure, {"start": clocks}, {})] == [0.0, 0.0]
    ((alone,),) = run_world(1, measure, {"start": [("a", 3.0)]}, {})
    assert alone[1] == 0.0


class FarAway:
    """The store and a rank 0 whose clock is `AHEAD`; `TRIPS` are the seconds of a request and of its answer."""

    AHEAD = 1000.0
    TRIPS = ((3.0, 5.0), (1.0, 1.0), (9.0, 0.5), (1.0, 1.5), (4.0, 4.0), (0.5, 7.0), (2.0, 2.0), (6.0, 6.0))

    def __init__(self) -> None:
        self.now = 0.0
        self.trips = iter(self.TRIPS)

    def set(self, key: str, value: str) -> None:
        there, self.back = next(self.trips)
        self.now += there
        self.answer = repr(self.now + self.AHEAD)

    def get(self, key: str) -> bytes:
        self.now += self.back
        return self.answer.encode()


def test_the_shortest_round_trip_is_believed_to_be_as_long_there_as_back() -> None:
    from megascale.comm import clock

    store: Any = FarAway()
    assert len(FarAway.TRIPS) == clock.ROUND_TRIPS
    assert clock._ask(store, 1, lambda: store.now) == FarAway.AHEAD
