"""Events, clock offsets and event files."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.core.events import COMPUTE, Event, RankEvents, event_file_name, read_events, write_events
from megascale.core.label import BACKWARD, FORWARD

times = st.floats(-1e9, 1e9)
texts = st.text(max_size=8)
numbers = st.integers(-1, 2**40)
spans = st.tuples(times, times)
events = st.builds(
    Event, axis=st.sampled_from([COMPUTE, "tp", "dp"]), name=texts, part=texts, step=numbers, chunk=numbers,
    microbatch=numbers, start=times, end=times, group=texts, sequence=numbers, bytes=numbers, peer=numbers, issue=times,
    waits=st.lists(spans, max_size=3).map(tuple), layer=numbers, stage=numbers, direction=texts,
)  # fmt: skip
ranks = st.builds(
    RankEvents, rank=numbers, world=numbers, coord=st.dictionaries(texts, numbers, max_size=3), host=texts,
    clock=st.lists(spans, max_size=3).map(tuple), dropped=numbers, events=st.lists(events, max_size=5).map(tuple),
)  # fmt: skip

GATHER = Event(
    "tp", "all_gather", "qkv", 7, 0, 5, 10.0, 11.0, group="tp", sequence=2, bytes=64, peer=-1, issue=9.5,
    waits=((10.25, 10.5), (10.75, 11.0)), layer=3, direction=FORWARD,
)  # fmt: skip
UPDATE = Event(COMPUTE, "update", "", 7, -1, -1, 12.0, 13.0)
RANK = RankEvents(3, 8, {"tp": 1, "pp": 1}, "node-1", ((0.0, 2.0), (20.0, 4.0)), 5, (GATHER, UPDATE))


@given(ranks)
def test_written_events_are_read_back(rank: RankEvents) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write_events(path, rank)
        assert read_events(path) == rank


def test_the_file_is_a_line_for_the_rank_and_one_for_each_event(tmp_path: Path) -> None:
    path = tmp_path / event_file_name(3)
    assert path.name == "rank-00003.jsonl"
    write_events(path, RANK)
    head, *lines = path.read_text().splitlines()
    assert json.loads(head)["rank"] == 3
    assert [json.loads(line)["name"] for line in lines] == ["all_gather", "update"]
    assert "waits" not in json.loads(lines[1])  # default values are not written
    assert list(tmp_path.iterdir()) == [path]
    assert list(tmp_path.glob(event_file_name("*"))) == [path]


def test_exposed_time_is_the_sum_of_the_waits() -> None:
    assert GATHER.exposed == 0.5
    assert UPDATE.exposed == 0


@pytest.mark.parametrize(
    ("time", "offset"), [(-5.0, 2.0), (0.0, 2.0), (5.0, 2.5), (20.0, 4.0), (30.0, 6.0), (40.0, 8.0), (99.0, 8.0)]
)
def test_the_offset_lies_on_the_line_between_two_measurements(time: float, offset: float) -> None:
    clock = ((40.0, 8.0), (0.0, 2.0), (20.0, 4.0))  # in any order
    assert dataclasses.replace(RANK, clock=clock).clock_offset(time) == pytest.approx(offset)


def test_one_measurement_holds_for_all_times_and_none_is_zero() -> None:
    assert dataclasses.replace(RANK, clock=((5.0, -1.5),)).clock_offset(1e6) == -1.5
    assert dataclasses.replace(RANK, clock=()).clock_offset(1e6) == 0
    assert dataclasses.replace(RANK, clock=((5.0, 1.0), (5.0, 1.0))).clock_offset(5.0) == 1


HEAD = '{"format": 2, "rank": 0, "world": 1, "coord": {}, "host": "", "clock": [], "dropped": 0}\n'
EVENT = '{"axis": "tp", "name": "x", "part": "", "step": 1, "chunk": 0, "microbatch": 0, "start": 0.0, "end": 1.0}\n'


def test_the_template_of_the_corrupt_files_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(HEAD + EVENT)
    assert len(read_events(path).events) == 1


def test_format_1_is_read(tmp_path: Path) -> None:
    """Format 1 has one text in place of the label's fields."""
    path = tmp_path / "file"
    path.write_text(HEAD.replace('"format": 2', '"format": 1') + EVENT.replace('"part": ""', '"what": "layer 3 qkv"'))
    (event,) = read_events(path).events
    assert event == Event("tp", "x", "layer 3 qkv", 1, 0, 0, 0.0, 1.0)
    assert event.label == "layer 3 qkv"


def test_an_event_has_a_label() -> None:
    assert GATHER.label == "layer 3 qkv"
    assert UPDATE.label == ""
    message = Event("pp", "send", "", 7, 0, 5, 12.0, 13.0, stage=2, direction=BACKWARD)
    assert message.label == "backward m5 stage 2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a file of events in format 1 or 2"),
        ("[]\n", "not an object"),
        (HEAD.replace('"format": 2', '"format": 3'), "not a file of events in format 1 or 2"),
        (
            HEAD.replace('"format": 2', '"format": 1') + EVENT.replace("part", "whom"),
            "line 2 is not an event: .*'whom'",
        ),
        (HEAD + EVENT.replace("part", "what"), "line 2 is not an event: .*'what'"),
        (HEAD + EVENT.replace("}", ', "layer": "3"}'), "line 2 is not an event: layer is '3'"),
        (HEAD.replace('"world": 1, ', ""), "not a file of events: .*'world'"),
        (HEAD.replace('"clock": [], ', ""), "not a file of events: .*'clock'"),
        (HEAD + EVENT + EVENT[:30], "line 3 is not an event: .* at column 2"),
        (HEAD + "7\n" + EVENT, "line 2 is not an event: not an object"),
        (HEAD + EVENT + EVENT.replace("step", "stop"), "line 3 is not an event: .*'stop'"),
        (HEAD + EVENT.replace('"step": 1, ', ""), "line 2 is not an event: .*'step'"),
        (HEAD + EVENT.replace("}", ', "waits": [[1.0]]}'), "line 2 is not an event: .*unpack"),
        (HEAD + EVENT.replace("}", ', "waits": 3}'), "line 2 is not an event: .*not iterable"),
        (HEAD + EVENT.replace("}", ', "waits": [["1", "2"]]}'), "line 2 is not an event: a time is '1'"),
        (HEAD + EVENT.replace("0.0", '"soon"'), "line 2 is not an event: start is 'soon'"),
        (HEAD + EVENT.replace("1.0", "NaN"), "line 2 is not an event: end is nan"),
        (HEAD + EVENT.replace("1.0", "1e999"), "line 2 is not an event: end is inf"),
        (HEAD + EVENT.replace("1.0", "1" + "0" * 400), "line 2 is not an event: end is 10"),
        (HEAD + EVENT.replace('"step": 1', '"step": "1"'), "line 2 is not an event: step is '1'"),
        (HEAD + EVENT.replace('"tp"', '["tp"]'), r"line 2 is not an event: axis is \['tp'\]"),
        (HEAD + "[" * 100_000, "line 2 is not an event: nested too deep"),
        (HEAD.replace('"world": 1', '"world": "1"') + EVENT, "not a file of events: world is '1'"),
        (HEAD.replace('"dropped": 0', '"dropped": null') + EVENT, "not a file of events: dropped is None"),
        (HEAD.replace('"coord": {}', '"coord": {"tp": "0"}') + EVENT, "not a file of events: tp is '0'"),
        (HEAD.replace('"clock": []', '"clock": [["0", 1]]') + EVENT, "not a file of events: a time is '0'"),
    ],
)
def test_a_corrupt_file_is_refused_with_the_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_events(path)


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\x80\x81")
    with pytest.raises(ValueError, match="decode"):
        read_events(path)
