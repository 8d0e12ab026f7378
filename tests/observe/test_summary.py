"""Calls, bytes and times of a summary are those of the events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.core.events import COMPUTE, Event, RankEvents
from megascale.observe.summary import Share, covered, over_ranks, summarize, table
from tests.observe import STEPS, job


@pytest.mark.parametrize("rank", range(4))
def test_calls_and_bytes_are_those_of_the_events(rank: int) -> None:
    events = job()[rank].events
    shares = {share.axis: share for share in summarize(job()[rank])}
    assert list(shares) == ["tp", "pp", "dp"]
    for axis, share in shares.items():
        found = [event for event in events if event.axis == axis]
        assert share.rank == rank
        assert share.calls * len(STEPS) == len(found) > 0
        assert share.bytes * len(STEPS) == sum(event.bytes for event in found) > 0
        assert share.exposed * len(STEPS) == pytest.approx(sum(event.exposed for event in found))


def test_times_are_means_over_the_steps() -> None:
    tp, pp, dp = summarize(job()[2])
    assert (tp.communication, tp.exposed) == (pytest.approx(0.008), pytest.approx(0.004))
    assert tp.hidden == pytest.approx(0.5)
    assert pp.hidden == pytest.approx(0.0)  # it waits from the beginning to the end
    assert dp.communication == pytest.approx(0.050)  # 30 ms and 40 ms, 20 of them at once
    assert dp.hidden == pytest.approx(1 - 15 / 50)


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple), max_size=10)


@given(spans)
def test_covered_counts_each_moment_once(given_spans: list[tuple[int, int]]) -> None:
    assert covered(given_spans) == len({moment for start, end in given_spans for moment in range(start, end)})


def one(*spans: tuple[float, float], waits: tuple[tuple[float, float], ...] = ()) -> Share:
    events = [Event("tp", "x", "", 1, 0, 0, *span, waits=waits if span == spans[0] else ()) for span in spans]
    (share,) = summarize(RankEvents(0, 1, {}, "", (), 0, (Event(COMPUTE, "F", "", 1, 0, 0, 0.0, 9.0), *events)))
    return share


def test_the_hidden_share_at_its_ends() -> None:
    assert one((0.0, 2.0), (1.0, 3.0)).hidden == 1
    assert one((0.0, 2.0), waits=((0.0, 2.0),)).hidden == 0
    assert one((1.0, 2.0), waits=((0.0, 2.0),)).hidden == 0  # compute waited before it began
    assert one((1.0, 1.0)).hidden is None


def test_a_rank_without_communication_has_no_share() -> None:
    assert summarize(RankEvents(0, 1, {}, "", (), 0, (Event(COMPUTE, "F", "", 1, 0, 0, 0.0, 9.0),))) == []
    assert summarize(RankEvents(0, 1, {}, "", (), 0, ())) == []


def test_the_mean_over_ranks_counts_a_rank_without_an_axis() -> None:
    shares = [Share(0, "dp", 2, 100, 1.0, 0.5), Share(0, "tp", 4, 10, 2.0, 1.0), Share(1, "tp", 6, 20, 3.0, 0.0)]
    assert over_ranks(shares) == [Share(None, "tp", 5, 15, 2.5, 0.5), Share(None, "dp", 1, 50, 0.5, 0.25)]
    assert over_ranks([]) == []


def test_the_table() -> None:
    shares = [Share(11, "tp", 4, 2048, 0.002, 0.0005), Share(None, "world", 1.5, 24, 0.0, 0.0)]
    assert table(shares).splitlines() == [
        "rank   axis  calls     bytes  communication   exposed  hidden",
        "  11     tp      4  2.00 KiB       2.000 ms  0.500 ms   75.0%",
        " all  world    1.5      24 B       0.000 ms  0.000 ms       -",
    ]


def test_json_has_units_in_its_names() -> None:
    assert Share(3, "tp", 4, 2048, 0.5, 0.125).as_json() == {
        "rank": 3, "axis": "tp", "calls": 4, "bytes": 2048, "communication_s": 0.5, "exposed_s": 0.125, "hidden": 0.75,
    }  # fmt: skip
