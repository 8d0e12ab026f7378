"""The clock offsets of hosts against rank 0's."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from megascale.core.rank import Rank
from tests.worlds import run_world

ROUNDING = 1e-9

Measured = tuple[float, float, float]
"""This rank's time, the seconds by which rank 0's clock is ahead, and the shortest round trip of this rank's questions,
infinite without any: it depends on the machine, and the error is half of it at most.
"""

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

        asked: list[float] = []

        def now(ahead: float = ahead, asked: list[float] = asked) -> float:
            asked.append(time.perf_counter() + ahead)
            return asked[-1]

        time.sleep(late.get(host, 0.0))
        own, offset = clock.clock_offset(world, _get_default_store(), label, host, now)
        assert own == asked[-1], "the time is the rank's own"
        trips = [after - before for before, after in zip(asked[:-1:2], asked[1:-1:2], strict=True)] if rank.rank else []
        found.append((own, offset, min(trips, default=math.inf)))
    return found


def assert_measured(found: list[Measured], clocks: Clocks) -> None:
    first = clocks[0]
    for host, ahead in set(clocks):
        of_host = [one for one, clock in zip(found, clocks, strict=True) if clock[0] == host]
        (offset,) = {offset for _, offset, _ in of_host}
        if host == first[0]:
            assert offset == 0, "ranks of rank 0's host have its clock"
        else:
            trip = min(trip for _, _, trip in of_host)
            assert offset == pytest.approx(first[1] - ahead, abs=trip / 2 + ROUNDING) and trip < math.inf


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
    assert [offset == 0 for _, offset, _ in found] == [True, False, True, False]


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
