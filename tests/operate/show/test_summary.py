"""The calls, bytes and times of a summary equal those of the events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.operate.show.summary import AxisCommunication, format_shares, mean_over_ranks, summarize, union_length
from megascale.record.events import COMPUTE, Event, RankEvents
from tests.operate.show.event_files import STEPS, job


@pytest.mark.parametrize("rank", range(4))
def test_calls_and_bytes_are_those_of_the_events(rank: int) -> None:
    events = job()[rank].events
    shares = {share.axis: share for share in summarize(job()[rank])}
    assert list(shares) == ["tp", "pp", "dp"]
    for axis, share in shares.items():
        axis_events = [event for event in events if event.axis == axis]
        assert share.rank == rank
        assert share.calls * len(STEPS) == len(axis_events) > 0
        assert share.bytes * len(STEPS) == sum(event.bytes for event in axis_events) > 0
        assert share.exposed_s * len(STEPS) == pytest.approx(sum(event.exposed for event in axis_events))


def test_times_are_means_over_the_steps() -> None:
    tp, pp, dp = summarize(job()[2])
    assert (tp.communication_s, tp.exposed_s) == (pytest.approx(0.008), pytest.approx(0.004))
    assert tp.hidden == pytest.approx(0.5)
    assert pp.hidden == pytest.approx(0.0)  # compute waits from start to end
    assert dp.communication_s == pytest.approx(0.050)  # 30 ms and 40 ms, which overlap for 20 ms
    assert dp.hidden == pytest.approx(1 - 15 / 50)


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple), max_size=10)


@given(spans)
def test_the_union_counts_every_moment_once(given_spans: list[tuple[int, int]]) -> None:
    assert union_length(given_spans) == len({moment for start, end in given_spans for moment in range(start, end)})


def share_of(*spans: tuple[float, float], waits: tuple[tuple[float, float], ...] = ()) -> AxisCommunication:
    events = [Event("tp", "x", "", 1, 0, 0, *span, waits=waits if span == spans[0] else ()) for span in spans]
    (share,) = summarize(RankEvents(0, 1, {}, "", (), 0, (Event(COMPUTE, "F", "", 1, 0, 0, 0.0, 9.0), *events)))
    return share


def test_the_limits_of_the_hidden_share() -> None:
    assert share_of((0.0, 2.0), (1.0, 3.0)).hidden == 1
    assert share_of((0.0, 2.0), waits=((0.0, 2.0),)).hidden == 0
    assert share_of((1.0, 2.0), waits=((0.0, 2.0),)).hidden == 0  # compute waited before the start, too
    assert share_of((1.0, 1.0)).hidden is None


def test_a_rank_without_communication_has_no_share() -> None:
    assert summarize(RankEvents(0, 1, {}, "", (), 0, (Event(COMPUTE, "F", "", 1, 0, 0, 0.0, 9.0),))) == []
    assert summarize(RankEvents(0, 1, {}, "", (), 0, ())) == []


def test_the_mean_over_ranks_counts_a_rank_without_an_axis() -> None:
    shares = [
        AxisCommunication(0, "dp", 2, 100, 1.0, 0.5),
        AxisCommunication(0, "tp", 4, 10, 2.0, 1.0),
        AxisCommunication(1, "tp", 6, 20, 3.0, 0.0),
    ]
    assert mean_over_ranks(shares) == [
        AxisCommunication(None, "tp", 5, 15, 2.5, 0.5),
        AxisCommunication(None, "dp", 1, 50, 0.5, 0.25),
    ]
    assert mean_over_ranks([]) == []


def test_the_table() -> None:
    shares = [AxisCommunication(11, "tp", 4, 2048, 0.002, 0.0005), AxisCommunication(None, "world", 1.5, 24, 0.0, 0.0)]
    assert format_shares(shares).splitlines() == [
        "rank   axis  calls     bytes  communication   exposed  hidden",
        "  11     tp      4  2.00 KiB       2.000 ms  0.500 ms   75.0%",
        " all  world    1.5      24 B       0.000 ms  0.000 ms       -",
    ]


def test_json_has_units_in_its_names() -> None:
    assert AxisCommunication(3, "tp", 4, 2048, 0.5, 0.125).as_json() == {
        "rank": 3, "axis": "tp", "calls": 4, "bytes": 2048, "communication_s": 0.5, "exposed_s": 0.125, "hidden": 0.75,
    }  # fmt: skip
