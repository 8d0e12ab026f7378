"""The timeline is a valid Chrome trace, and shows the recorded events."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.operate.show import chrome_trace
from megascale.operate.show.chrome_trace import TICKS_PER_SECOND, Slice, assign_lanes, nest_slices, rank_rows
from megascale.record.events import COMPUTE, Event, RankEvents
from tests.operate.show.event_files import job, on_own_clock

ACTION = Event(COMPUTE, "F", "", 1, 0, 3, 0.0, 1.0)

slices = st.lists(
    st.builds(
        lambda start, length, wait: Slice(start, start + length, ACTION, wait),
        st.integers(0, 30), st.integers(0, 15), st.booleans(),
    ), max_size=12,
)  # fmt: skip

times = st.floats(0, 1).map(lambda time: 5e5 + time)  # a host that has been up for six days
spans = st.tuples(times, times).map(sorted).map(tuple)
events = st.builds(
    lambda span, axis, waits: Event(
        axis, "x", "", 1, 0, 0, *span, waits=() if axis == COMPUTE else tuple(waits), issue=span[0]
    ),
    spans, st.sampled_from([COMPUTE, "tp", "dp"]), st.lists(spans, max_size=2),
)  # fmt: skip
clocks = st.lists(st.tuples(times, st.floats(-2, -1.999)), max_size=3).map(tuple)
ranks = st.builds(
    lambda clock, drawn: RankEvents(0, 1, {}, "", clock, 0, tuple(drawn)), clocks, st.lists(events, max_size=12)
)


def misplaced(spans: Iterable[tuple[int, int]]) -> int:
    """Count the slices that a viewer drops: in order of their start, slices that end after an open slice."""
    open_ends: list[int] = []
    count = 0
    for start, end in spans:
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        count += bool(open_ends) and end > open_ends[-1]
        open_ends.append(end)
    return count


def merged(path: Path, ranks: list[RankEvents]) -> tuple[chrome_trace.TraceStats, list[dict]]:
    """Write the timeline of ranks. Returns its counts and the items of the file."""
    written = chrome_trace.write_trace(path, ranks, chrome_trace.first_start(ranks))
    document = json.loads(path.read_text())
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    return written, document["traceEvents"]


def of_phase(items: list[dict], phase: str) -> list[dict]:
    return [item for item in items if item["ph"] == phase]


def threads(items: list[dict]) -> dict[tuple[int, int], str]:
    """The names of the rows, by (pid, tid)."""
    named = [item for item in of_phase(items, "M") if item["name"] == "thread_name"]
    return {(item["pid"], item["tid"]): item["args"]["name"] for item in named}


def as_a_viewer_reads(items: list[dict]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """The spans of every row in nanoseconds, rounded down, by their start and then in the order of the file."""
    rows = defaultdict(list)
    for item in of_phase(items, "X"):
        start = int(item["ts"] * 1000)
        rows[item["pid"], item["tid"]].append((start, start + int(item["dur"] * 1000)))
    return {key: sorted(spans, key=lambda span: span[0]) for key, spans in rows.items()}


@given(slices)
def test_nested_slices_nest_and_cover_the_same_ticks(given_slices: list[Slice]) -> None:
    nested = nest_slices(given_slices)
    assert misplaced((slice.start, slice.end) for slice in nested) == 0
    assert [slice.start for slice in nested] == sorted(slice.start for slice in nested)
    for wait in (False, True):
        after, before = (
            Counter(tick for s in some if s.wait is wait for tick in range(s.start, s.end))
            for some in (nested, given_slices)
        )
        assert after == before


def test_nested_slices_are_not_split() -> None:
    nested = [Slice(0, 10, ACTION), Slice(0, 4, ACTION), Slice(4, 10, ACTION, wait=True), Slice(10, 12, ACTION)]
    assert nest_slices(reversed(nested)) == nested
    same = [Slice(0, 10, ACTION, wait=True), Slice(0, 10, ACTION)]
    assert [slice.wait for slice in nest_slices(same)] == [False, True]  # the wait within the action


def test_a_wait_is_split_at_the_end_of_its_action() -> None:
    action, wait = Slice(0, 10, ACTION), Slice(8, 13, ACTION, wait=True)
    assert misplaced([action[:2], wait[:2]]) == 1
    assert [slice[:2] for slice in nest_slices([action, wait])] == [(0, 10), (8, 10), (10, 13)]


@given(slices)
def test_lanes_have_no_overlaps_and_are_as_few_as_possible(given_slices: list[Slice]) -> None:
    lanes = assign_lanes(given_slices)
    assert Counter(slice for lane in lanes for slice in lane) == Counter(given_slices)
    for lane in lanes:
        assert all(a.end <= b.start for a, b in itertools.pairwise(lane))
    long = [slice for slice in given_slices if slice.start < slice.end]
    at_once = Counter(tick for slice in long for tick in range(slice.start, slice.end))
    if len(long) == len(given_slices):
        assert len(lanes) == max(at_once.values(), default=0)


@given(ranks)
def test_a_viewer_drops_nothing(rank: RankEvents) -> None:
    with tempfile.TemporaryDirectory() as folder:
        written, items = merged(Path(folder) / "t.json", [rank])
    assert written.slices == len(of_phase(items, "X")) >= len(rank.events)
    for spans in as_a_viewer_reads(items).values():
        assert spans[0][0] >= 0
        assert misplaced(spans) == 0


def test_times_in_nanoseconds_would_overlap_where_slices_touch() -> None:
    """Ticks are eighths of a microsecond because some viewers round times down to nanoseconds."""

    def touch(ticks: int, microsecond: int) -> bool:
        starts = [int(tick / microsecond * 1000) for tick in (ticks, ticks + 5)]
        return starts[0] + int(5 / microsecond * 1000) == starts[1]

    some = range(10**6)
    assert not all(touch(ticks, 1000) for ticks in some)
    assert all(touch(ticks, TICKS_PER_SECOND // 10**6) for ticks in some)


def test_the_timeline_is_a_chrome_trace(tmp_path: Path) -> None:
    written, items = merged(tmp_path / "t.json", job())
    assert {item["ph"] for item in items} == {"M", "X", "s", "f"}
    for item in items:
        assert isinstance(item["name"], str)
        assert isinstance(item["pid"], int) and isinstance(item["tid"], int)
        assert item["ph"] == "M" or item["ts"] >= 0
        assert item["ph"] != "X" or item["dur"] >= 0
    assert min(item["ts"] for item in of_phase(items, "X")) == 0
    assert written.slices == len(of_phase(items, "X"))
    waits = sum(len(event.waits) for events in job() for event in events.events)
    assert written.slices == sum(len(events.events) for events in job()) + waits


def test_ranks_and_rows_have_names_and_an_order(tmp_path: Path) -> None:
    _, items = merged(tmp_path / "t.json", job())
    names = {item["pid"]: item["args"]["name"] for item in items if item["name"] == "process_name"}
    assert names[3] == "rank 3 (pp 1, dp 0, tp 1)"
    assert sorted(names) == [0, 1, 2, 3]
    order = {item["pid"]: item["args"]["sort_index"] for item in items if item["name"] == "process_sort_index"}
    assert order == {0: 0, 1: 1, 2: 2, 3: 3}
    of_rank_2 = [name for (rank, _), name in sorted(threads(items).items()) if rank == 2]
    assert of_rank_2 == ["compute", "tp", "pp", "dp", "dp 2"]
    assert not {thread for _, thread in threads(items)} & set(names)  # a viewer would put such a row first
    indices = [item["args"]["sort_index"] for item in items if item["name"] == "thread_sort_index" and item["pid"] == 2]
    assert indices == [0, 1, 2, 3, 4]


def test_slices_have_names_and_details(tmp_path: Path) -> None:
    _, items = merged(tmp_path / "t.json", job(steps=(7,))[2:])
    by_name = {(threads(items)[item["pid"], item["tid"]], item["name"]): item for item in of_phase(items, "X")}
    action = by_name["compute", "F m1 c0"]
    assert action["dur"] == 30_000
    assert action["args"] == {"step": 7, "micro-batch": 1, "chunk": 0}
    assert by_name["compute", "update c0"]["args"] == {"step": 7, "chunk": 0}
    receive = by_name["pp", "pp.receive forward m0 stage 1"]
    assert receive["args"] == {
        "step": 7, "micro-batch": 0, "group": "pp up", "sequence": 7, "peer": 1, "bytes": 512, "issue us": -500.0,
        "exposed ms": 30.0,
    }  # fmt: skip
    wait = by_name["compute", "wait pp.receive forward m0 stage 1"]
    assert (wait["ts"], wait["dur"]) == (receive["ts"], receive["dur"]) == (0, 30_000)
    inner = by_name["compute", "wait tp.all_gather layer 0 qkv"]
    assert action["ts"] < inner["ts"] < inner["ts"] + inner["dur"] < action["ts"] + action["dur"]
    assert ("dp", "dp.reduce_scatter chunk 0") in by_name and ("dp 2", "dp.reduce_scatter chunk 1") in by_name


def test_several_waits_for_a_collective_are_separate_slices(tmp_path: Path) -> None:
    _, items = merged(tmp_path / "t.json", job(steps=(7,))[:1])
    waits = [item["dur"] for item in of_phase(items, "X") if item["name"] == "wait dp.reduce_scatter chunk 0"]
    assert waits == [10_000, 5_000]


def test_a_wait_shorter_than_a_tick_is_not_shown() -> None:
    event = Event("tp", "x", "", 1, 0, 0, 0.0, 1.0, waits=((0.5, 0.5 + 1e-9), (0.6, 0.7)))
    (compute, _) = rank_rows(RankEvents(0, 1, {}, "", (), 0, (event,)), 0.0)
    assert [slice[:2] for slice in compute.slices] == [(0.6 * TICKS_PER_SECOND, 0.7 * TICKS_PER_SECOND)]


def test_an_arrow_leads_from_each_send_to_its_receive(tmp_path: Path) -> None:
    written, items = merged(tmp_path / "t.json", job())
    assert written.arrows == 12 and written.single == written.reversed == 0
    starts, ends = of_phase(items, "s"), of_phase(items, "f")
    assert [item["id"] for item in starts] == [item["id"] for item in ends] == list(range(1, 13))
    ends_of_slices = [number for number, item in enumerate(items) if item["ph"] == "X"]
    assert items.index(starts[0]) > ends_of_slices[-1]
    for start, end in zip(starts, ends, strict=True):
        assert end["bp"] == "e" and end["ts"] >= start["ts"]
        assert (start["pid"] + 2, "s") == (end["pid"], start["ph"])
        send, receive = (
            next(
                slice for slice in of_phase(items, "X")
                if (slice["pid"], slice["tid"]) == (end_of_arrow["pid"], end_of_arrow["tid"])
                and slice["ts"] <= end_of_arrow["ts"] < slice["ts"] + slice["dur"]
            )
            for end_of_arrow in (start, end)
        )  # fmt: skip
        assert send["name"] == receive["name"].replace("receive", "send")
        assert send["args"]["step"] == receive["args"]["step"]


def test_messages_of_the_first_format_are_matched_by_their_order(tmp_path: Path) -> None:
    """Events of format 1 have no stage: a channel delivers messages in sending order."""
    old = [
        dataclasses.replace(
            events,
            events=tuple(dataclasses.replace(e, part=e.label, layer=-1, stage=-1, direction="") for e in events.events),
        )
        for events in job()
    ]
    assert merged(tmp_path / "old.json", old) == merged(tmp_path / "new.json", job())


def test_messages_of_two_chunks_are_told_apart(tmp_path: Path) -> None:
    """The messages have the same ranks, step and micro-batch; the last message sent is received first."""

    def message(name: str, stage: int, start: float) -> Event:
        peer = 1 if name == "send" else 0
        return Event("pp", name, "", 1, 0, 0, start, start + 0.5, "pp.up", peer=peer, stage=stage, direction="forward")

    sends, receives = [message("send", 1, 0.0), message("send", 3, 1.0)], [message("receive", 3, 2.0)]
    ranks = [RankEvents(rank, 2, {}, "", (), 0, tuple(events)) for rank, events in enumerate((sends, receives))]
    written, items = merged(tmp_path / "t.json", ranks)
    assert (written.arrows, written.single) == (1, 1)
    assert [item["ts"] for item in of_phase(items, "s")] == [1_000_000.0]


def test_equal_messages_of_a_step_are_matched_in_their_order(tmp_path: Path) -> None:
    """Evaluations after a step, for example, send such messages."""
    sent = [dataclasses.replace(events, events=tuple(e for e in events.events if e.axis == "pp")) for events in job()]
    same = [
        dataclasses.replace(events, events=tuple(dataclasses.replace(e, step=1) for e in events.events))
        for events in sent
    ]
    written, items = merged(tmp_path / "t.json", same)
    assert written.arrows == 12
    assert {end["ts"] - start["ts"] for start, end in zip(of_phase(items, "s"), of_phase(items, "f"), strict=True)} == {
        0.0  # the receives were posted before the sends
    }


def test_a_message_with_a_single_end_has_no_arrow(tmp_path: Path) -> None:
    ranks = job()
    without = dataclasses.replace(ranks[2], events=tuple(e for e in ranks[2].events if e.name != "receive"))
    written, _ = merged(tmp_path / "t.json", [ranks[0], ranks[1], without, ranks[3]])
    assert (written.arrows, written.single, written.reversed) == (6, 6, 0)
    written, _ = merged(tmp_path / "t.json", ranks[:3])
    assert (written.arrows, written.single) == (6, 0)  # rank 1's peer is not shown: its messages do not count


SKEWS = ((0.0, 0.0), (-2.0, 1e-5), (2.0, -1e-5), (1.2345678, 0.0))


@pytest.fixture
def skewed() -> list[RankEvents]:
    return [on_own_clock(events, *skew) for events, skew in zip(job(), SKEWS, strict=True)]


def test_different_clocks_are_aligned(skewed: list[RankEvents], tmp_path: Path) -> None:
    stats, items = merged(tmp_path / "common.json", job())
    aligned_stats, aligned_items = merged(tmp_path / "skewed.json", skewed)
    assert stats == aligned_stats
    for item, aligned in zip(items, aligned_items, strict=True):
        assert item["name"] == aligned["name"]
        assert item.get("ts", 0) == pytest.approx(aligned.get("ts", 0), abs=0.25)
        assert item.get("dur", 0) == pytest.approx(aligned.get("dur", 0), abs=0.25)


def messages(items: list[dict]) -> dict[tuple, dict[str, tuple[float, float]]]:
    """The spans of the send and the receive of every message."""
    spans: defaultdict[tuple, dict[str, tuple[float, float]]] = defaultdict(dict)
    for item in of_phase(items, "X"):
        end, _, label = item["name"].removeprefix("pp.").partition(" ")
        if item["name"].startswith("pp."):
            sender = item["pid"] if end == "send" else item["args"]["peer"]
            spans[sender, item["args"]["step"], label][end] = (item["ts"], item["ts"] + item["dur"])
    return spans


def test_no_receive_ends_before_its_send_starts(skewed: list[RankEvents], tmp_path: Path) -> None:
    _, items = merged(tmp_path / "t.json", skewed)
    assert len(messages(items)) == 12
    assert all(sides["receive"][1] >= sides["send"][0] for sides in messages(items).values())


def test_without_the_offsets_receives_end_before_their_sends_start(skewed: list[RankEvents], tmp_path: Path) -> None:
    unknown = [dataclasses.replace(events, clock=()) for events in skewed]
    written, items = merged(tmp_path / "t.json", unknown)
    early = sum(sides["receive"][1] < sides["send"][0] for sides in messages(items).values())
    assert written.reversed == early == 12
    assert written.arrows == 0


def test_the_first_event_of_a_step_may_be_a_wait() -> None:
    event = Event("pp", "receive", "", 4, 0, 0, 5.0, 6.0, waits=((4.5, 6.0),))
    later = dataclasses.replace(event, step=5, start=7.0, end=8.0, waits=())
    rank = RankEvents(0, 1, {}, "", ((0.0, 10.0),), 0, (event, later))
    assert chrome_trace.step_starts(rank) == {4: 14.5, 5: 17.0}


def test_a_trace_may_have_no_events(tmp_path: Path) -> None:
    written, items = merged(tmp_path / "t.json", [RankEvents(0, 1, {}, "", (), 0, ())])
    assert written.slices == 0 and {item["ph"] for item in items} == {"M"}
    assert merged(tmp_path / "t.json", [])[1] == []
