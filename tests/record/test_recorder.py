"""What a recorder writes: order, exposed times, and the totals in a step's metrics."""

from __future__ import annotations

import itertools
import mmap
import re
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.comm.group import Group, TrackedWork
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.record.events import COMPUTE, Event
from megascale.record.layout import Phase, log_bytes
from megascale.record.log import RankLog
from megascale.record.log_reader import LogReader
from megascale.record.recorder import MAX_MARKS_AT_ONCE, EventRecord, Recorder, Traffic
from tests.recorded_events import drain, recorded_events
from tests.runs import GPT, build_run, config_of, send_messages, settings
from tests.worlds import run_world


class Clock:
    """A host's clock that the test moves."""

    synchronous = True

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> Any:
        return self.now

    def seconds(self, mark: Any) -> float | None:
        return mark


@dataclass(frozen=True)
class Moment:
    """The number of a mark in the work of a device."""

    number: int


class Device:
    """A device behind the host: its n-th mark becomes n seconds once n <= `passed`."""

    synchronous = False

    def __init__(self) -> None:
        self.marks = self.passed = self.asked = 0

    def mark(self) -> Any:
        self.marks += 1
        return Moment(self.marks)

    def seconds(self, mark: Any) -> float | None:
        self.asked += 1
        return float(mark.number) if mark.number <= self.passed else None


class Work:
    """A communication without host time; on a device its end is a mark."""

    def __init__(self, timer: Any) -> None:
        self._timer = timer
        self.completed_at: Any = None

    def wait(self) -> None:
        return None

    def in_background(self) -> Work:
        self.completed_at = self._timer.mark()
        return self


def in_a_step(*arguments: Any, **more: Any) -> Recorder:
    """A recorder in the first step."""
    recorder = Recorder(*arguments, **more)
    recorder.step = 1
    return recorder


def begin(recorder: Recorder, axis: str = "tp", nbytes: int = 8, *, wait: bool = False, peer: int = -1) -> TrackedWork:
    """Issue a communication in a group of this axis."""
    group = Group(axis, (0, 1), 0, recorder=recorder)
    return group.issue("all_reduce", "", nbytes, lambda: Work(recorder.timer), wait=wait, peer=peer)


def total(*parts: dict[str, Traffic]) -> dict[str, Traffic]:
    """The sum by axis."""
    found: defaultdict[str, Traffic] = defaultdict(Traffic)
    for part in parts:
        for axis, traffic in part.items():
            found[axis].calls += traffic.calls
            found[axis].bytes += traffic.bytes
            found[axis].exposed_s += traffic.exposed_s
    return dict(found)


def told_by(events: list[Event]) -> dict[str, Traffic]:
    """The traffic of events, by axis."""
    return total(*({e.axis: Traffic(1, e.bytes, e.exposed)} for e in events if e.axis != COMPUTE))


def assert_same(found: dict[str, Traffic], expected: dict[str, Traffic]) -> None:
    assert {axis: (t.calls, t.bytes) for axis, t in found.items()} == {
        axis: (t.calls, t.bytes) for axis, t in expected.items()
    }
    for axis, traffic in found.items():
        assert traffic.exposed_s == pytest.approx(expected[axis].exposed_s, abs=1e-9)


@given(st.lists(st.sampled_from(["tp", "dp", "pp.up"]), max_size=30))
def test_each_group_counts_its_own_communications(groups: list[str]) -> None:
    recorder = in_a_step()
    for group in groups:
        begin(recorder, group, wait=True)
    for group in set(groups):
        assert [e.sequence for e in recorded_events(recorder) if e.group == group] == list(range(groups.count(group)))


def places(recorder: Recorder) -> list[tuple[str, int, int]]:
    return [(event.name, event.chunk, event.microbatch) for event in recorded_events(recorder)]


def test_actions_give_their_place_to_the_communications_inside() -> None:
    recorder = in_a_step()
    begin(recorder, wait=True)
    with recorder.action("F", 1, 7):
        begin(recorder, wait=True)
        with recorder.action("update", 2):
            begin(recorder, wait=True)
        begin(recorder, wait=True)
    begin(recorder, wait=True)
    assert places(recorder) == [
        ("all_reduce", -1, -1),
        ("F", 1, 7), ("all_reduce", 1, 7),
        ("update", 2, -1), ("all_reduce", 2, -1),
        ("all_reduce", 1, 7),
        ("all_reduce", -1, -1),
    ]  # fmt: skip


def test_a_communication_keeps_the_place_in_which_it_was_issued() -> None:
    recorder = in_a_step()
    with recorder.action("F", 0, 1):
        begun = begin(recorder)
    recorder.step = 5
    with recorder.action("F", 0, 2):
        begun.wait()
    assert [(e.step, e.microbatch) for e in recorded_events(recorder) if e.axis == "tp"] == [(1, 1)]


def test_an_action_that_fails_ends_all_the_same() -> None:
    recorder = in_a_step()
    with pytest.raises(KeyError), recorder.action("F", 0, 3):
        raise KeyError
    begin(recorder, wait=True)
    assert places(recorder) == [("F", 0, 3), ("all_reduce", -1, -1)]


def test_what_is_under_way_is_no_event_yet() -> None:
    recorder = in_a_step()
    with recorder.action("F"):
        begun = begin(recorder)
        assert recorded_events(recorder) == []
    assert [event.name for event in recorded_events(recorder)] == ["F"]
    begun.wait()
    assert [event.name for event in recorded_events(recorder)] == ["F", "all_reduce"], "in the order of their issue"


def spans(recorder: Recorder, *communications: tuple[float, float]) -> list[tuple[float, float]]:
    """The (start, end) in the event log of communications of a channel with given (issue, end)."""
    for issue, end in communications:
        recorder.timer.now = issue  # type: ignore[attr-defined]
        record = recorder.record_communication("tp", "tp", "all_reduce", "", 8)
        recorder.close(record, end, known=True)
    return [(event.start, event.end) for event in recorded_events(recorder)]


def test_a_communication_starts_when_the_one_before_it_is_done() -> None:
    assert spans(in_a_step(Clock()), (0.0, 4.0), (1.0, 6.0), (7.0, 8.0)) == [(0, 4), (4, 6), (7, 8)]


def test_one_that_overtook_another_leaves_the_channel_to_it() -> None:
    assert spans(in_a_step(Clock()), (0.0, 10.0), (1.0, 5.0), (6.0, 12.0)) == [(0, 10), (5, 5), (10, 12)]


def test_messages_of_each_peer_and_direction_have_a_channel() -> None:
    recorder = in_a_step(Clock())
    for name, peer in (("send", 1), ("receive", 1), ("send", 2), ("send", 1)):
        record = recorder.record_communication("pp", "pp.up", name, "", 8, peer)
        recorder.close(record, 4.0 + recorder._sequences["pp.up"], known=True)
    assert [event.start for event in recorded_events(recorder)] == [0, 0, 0, 5]


@pytest.mark.parametrize("timer", [Clock, Device])
def test_a_recorder_that_is_off_keeps_nothing(timer: type) -> None:
    clock = timer()
    recorder = in_a_step(clock, enabled=False)
    with recorder.action("F", 0, 0):
        begin(recorder, wait=True)
        pending = begin(recorder, peer=1)
    pending.wait()
    assert pending.is_completed() and recorder.take_traffic() == {} and recorded_events(recorder) == []
    assert not isinstance(clock, Device) or clock.marks == 1, "only what says when a message has gone is marked"


def test_the_wait_of_a_host_counts_at_once() -> None:
    clock = Clock()
    recorder = in_a_step(clock)
    begun = begin(recorder)
    clock.now = 2.0
    record = begun._record
    assert recorder.record_wait(record, 0.5) == 2.0
    assert recorder.take_traffic() == {"tp": Traffic(1, 8, 1.5)}
    assert recorder.take_traffic() == {}


def test_a_mean_over_steps() -> None:
    assert Traffic(6, 96, 0.75).per_step(3) == {"calls": 2, "bytes": 32, "exposed_s": 0.25}


# A device that is behind the host.


def test_a_wait_of_a_device_counts_once_and_only_when_it_is_past() -> None:
    device = Device()
    recorder = in_a_step(device)
    begin(recorder, wait=True)
    issue, waited = 1, 2
    assert device.marks == waited
    for device.passed in (0, issue):
        assert recorded_events(recorder) == []
        assert recorder.take_traffic().get("tp", Traffic()).exposed_s == 0
    device.passed = waited
    assert recorder.take_traffic() == {"tp": Traffic(0, 0, 1.0)}, "its call was counted when it was issued"
    assert recorder.take_traffic() == {}
    (event,) = recorded_events(recorder)
    assert (event.issue, event.start, event.end, event.waits) == (1, 1, 2, ((1, 2),))


def test_what_a_device_did_in_the_background_is_known_without_a_wait() -> None:
    device = Device()
    recorder = in_a_step(device)
    begun = begin(recorder)
    device.passed = 1
    assert not begun.is_completed() and recorded_events(recorder) == []
    device.passed = 2
    assert begun.is_completed()
    (event,) = recorded_events(recorder)
    assert (event.start, event.end, event.waits) == (1, 2, ())
    begun.wait()  # does nothing
    assert device.marks == 2 and recorder.take_traffic() == {"tp": Traffic(1, 8, 0.0)}


def test_asking_for_events_loses_no_exposed_time() -> None:
    device = Device()
    recorder = in_a_step(device)
    begin(recorder, wait=True)
    device.passed = device.marks
    assert len(recorded_events(recorder)) == len(recorded_events(recorder)) == 1
    assert recorder.take_traffic() == {"tp": Traffic(1, 8, 1.0)}


def test_what_was_overwritten_before_the_device_came_to_it_is_counted() -> None:
    device = Device()
    recorder = in_a_step(device, RankLog(memory=mmap.mmap(-1, log_bytes(3))))
    for _ in range(10):
        begin(recorder, wait=True)
    device.passed = device.marks
    assert recorder.take_traffic() == {"tp": Traffic(10, 80, 10.0)}
    assert [event.sequence for event in recorded_events(recorder)] == [8, 9]


moves = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from(["tp", "dp"])),
    st.tuples(st.sampled_from(["wait", "is_completed", "pass"]), st.integers(0, 12)),
    st.tuples(st.sampled_from(["take", "action", "keep up"]), st.just(0)),
)


@given(st.lists(moves, max_size=40))
def test_on_a_device_nothing_is_lost_or_counted_twice(script: list[tuple[str, Any]]) -> None:
    device = Device()
    recorder = in_a_step(device)
    begun: list[TrackedWork] = []
    taken: list[dict[str, Traffic]] = []
    for move, value in script:
        if move == "begin":
            begun.append(begin(recorder, value))
        elif move == "pass":
            device.passed = min(device.marks, device.passed + value)
        elif move == "take":
            taken.append(recorder.take_traffic())
        elif move == "keep up":
            recorder.resolve_oldest_marks()
        elif move == "action":
            with recorder.action("F"):
                device.mark()
        elif begun:
            getattr(begun[value % len(begun)], move)()
        for event in recorded_events(recorder):
            assert all(t <= device.passed for t in (event.issue, event.end, *itertools.chain(*event.waits)))
    for each in begun:
        each.wait()
    device.passed = device.marks
    taken.append(recorder.take_traffic())
    events = recorded_events(recorder)
    assert sum(event.axis != COMPUTE for event in events) == len(begun)
    assert_same(total(*taken), told_by(events))
    assert not recorder._unresolved and recorder.take_traffic() == {}


def acted(recorder: Recorder, actions: int) -> None:
    """Actions of two marks each."""
    for microbatch in range(actions):
        with recorder.action("F", 0, microbatch):
            pass


def resolved(recorder: Recorder) -> int:
    return len(LogReader(recorder.log.memory).drain().events)


def test_a_host_that_is_ahead_resolves_what_the_device_has_passed() -> None:
    device = Device()
    recorder = in_a_step(device)
    acted(recorder, 10)
    for passed, expected in ((1, 0), (2, 1), (7, 3), (18, 9)):
        device.passed = passed
        recorder.resolve_oldest_marks()
        assert resolved(recorder) == expected


def test_a_device_that_may_soon_wait_for_the_host_is_not_kept_waiting() -> None:
    device = Device()
    recorder = in_a_step(device)
    acted(recorder, 10)
    device.passed = 19  # it has begun with the newest
    recorder.resolve_oldest_marks()
    assert resolved(recorder) == 0 and device.asked == 1
    recorder.resolve_marks()
    assert resolved(recorder) == 9


def test_what_is_not_complete_holds_up_what_came_after_it_for_a_while() -> None:
    device = Device()
    recorder = in_a_step(device)
    begun = begin(recorder)
    acted(recorder, 3)
    device.passed = device.marks - 2
    recorder.resolve_oldest_marks()
    assert resolved(recorder) == 0
    begun.wait()
    acted(recorder, 1)
    device.passed = device.marks - 2
    recorder.resolve_oldest_marks()
    assert resolved(recorder) == 4


@pytest.mark.parametrize("lag", [0, 2, 20, 5000])
def test_keeping_up_is_a_little_work_for_each_record(lag: int) -> None:
    """The work does not depend on the lag of the device."""
    device = Device()
    recorder = in_a_step(device)
    most = 0
    for _ in range(2000):
        acted(recorder, 1)
        device.passed = max(0, device.marks - lag)
        before = device.asked
        recorder.resolve_oldest_marks()
        most = max(most, device.asked - before)
    assert device.asked <= 2000 * 5
    device.passed = device.marks - 2  # a device that comes to much at once
    before = device.asked
    recorder.resolve_oldest_marks()
    assert max(most, device.asked - before) <= 3 * MAX_MARKS_AT_ONCE
    assert len(recorder._unresolved) >= 1


def test_the_backlog_is_the_unresolved_records_before_a_mark() -> None:
    device = Device()
    recorder = in_a_step(device)
    acted(recorder, 3 * MAX_MARKS_AT_ONCE)
    until = device.mark()
    acted(recorder, 1)
    turns = 0
    while recorder.has_backlog(until):
        device.passed += 1
        recorder.resolve_oldest_marks()
        turns += 1
    assert len(recorder._unresolved) == MAX_MARKS_AT_ONCE and turns <= 6 * MAX_MARKS_AT_ONCE
    device.passed = device.marks
    acted(recorder, 3 * MAX_MARKS_AT_ONCE)
    assert not recorder.has_backlog(until), "the device is there, however much is left"


@pytest.mark.parametrize("enabled", [True, False])
def test_the_clock_of_a_host_has_nothing_to_resolve(enabled: bool) -> None:
    class Asked(Clock):
        def seconds(self, mark: Any) -> float | None:
            raise AssertionError("its marks are seconds")

    recorder = in_a_step(Asked(), enabled=enabled)
    acted(recorder, 3 * MAX_MARKS_AT_ONCE)
    recorder.resolve_oldest_marks()
    assert not recorder.has_backlog(recorder.mark())


# Real steps.

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp dp2 zero2": {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__zero": 2},
    "pp2 vpp2 dp2": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2},
}


@dataclass(frozen=True)
class RankEvents:
    """The events of a rank, its waits (axis, start, end), (start, end, traffic) of every step and of the time after,
    and the ranks of the groups.
    """

    events: list[Event]
    waits: list[tuple[str, float, float]]
    steps: list[tuple[float, float, dict[str, Traffic]]]
    groups: dict[str, tuple[int, ...]]


def record_steps(rank: Rank, config: RunConfig) -> RankEvents:
    """Train two steps with collectives by messages, in the background."""
    from megascale.train.step import train_step

    run = build_run(rank, config)
    recorder = run.mesh.recorder
    for group in run.mesh.groups:
        if not group.name.startswith("pp"):
            send_messages(group)
    recorder.take_traffic()
    waits, record_wait = list[tuple[str, float, float]](), recorder.record_wait

    def wait(record: EventRecord, start: float) -> float:
        waits.append((record.axis, start, end := record_wait(record, start)))
        return end

    recorder.record_wait = wait
    steps = []
    for step in range(3):
        start = time.perf_counter()
        if step < 2:
            train_step(run, run.train_loader.batch(run.progress.samples))
        else:
            run.buffers.finish_param_gather()
            run.pipeline.finish_sends()
        steps.append((start, time.perf_counter(), recorder.take_traffic()))
    return RankEvents(recorded_events(recorder), waits, steps, {group.name: group.ranks for group in run.mesh.groups})


@pytest.fixture(scope="module", params=LAYOUTS)
def rank_logs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[RankEvents]:
    """The event logs of four ranks, by layout."""
    folder = tmp_path_factory.mktemp("logs")
    config = config_of(settings(GPT, folder, train__precision="fp32", **LAYOUTS[request.param]), folder)
    return run_world(config.world_size, record_steps, config)


def test_ranks_of_a_group_number_the_same_collectives(rank_logs: list[RankEvents]) -> None:
    told: defaultdict[tuple[str, tuple[int, ...]], list[list[Any]]] = defaultdict(list)
    for rank in rank_logs:
        for name, ranks in rank.groups.items():
            own = [event for event in rank.events if event.group == name]
            assert [event.sequence for event in own] == list(range(len(own)))
            collectives = [e for e in own if e.peer < 0]
            told[name, ranks].append([(e.name, e.bytes, e.microbatch) for e in collectives])
            if name != "tied":  # the ends of the pipeline name the embedding by their own chunks
                told[name, ranks][-1] += [(e.label, e.chunk) for e in collectives]
    for (name, ranks), lists in told.items():
        assert len(lists) == len(ranks) and all(each == lists[0] for each in lists), name
    assert sum(len(lists[0]) for lists in told.values()) > 20


def test_each_message_is_recorded_by_both_sides(rank_logs: list[RankEvents]) -> None:
    sides: dict[str, Counter[Any]] = {"send": Counter(), "receive": Counter()}
    for number, rank in enumerate(rank_logs):
        for event in rank.events:
            if event.peer >= 0:
                ends = (number, event.peer) if event.name == "send" else (event.peer, number)
                sides[event.name][event.step, event.direction, event.stage, event.microbatch, event.bytes, ends] += 1
    assert sides["send"] == sides["receive"]
    assert bool(sides["send"]) == (len(rank_logs[0].groups["pp.up"]) > 1)


def test_events_are_in_the_order_of_their_issue_and_those_of_a_channel_follow_each_other(
    rank_logs: list[RankEvents],
) -> None:
    for rank in rank_logs:
        issues = [event.start if event.axis == COMPUTE else event.issue for event in rank.events]
        assert issues == sorted(issues)
        ends: dict[Any, float] = {}
        for event in rank.events:
            assert event.start <= event.end
            if event.axis == COMPUTE:
                continue
            assert event.issue <= event.start
            assert all(event.issue <= low <= high for low, high in event.waits)
            channel = (event.group, event.name if event.peer >= 0 else "", event.peer)
            assert ends.get(channel, 0.0) <= event.start or event.start == event.end, "only what overtook has no time"
            ends[channel] = max(event.end, ends.get(channel, 0.0))


def test_communications_belong_to_a_chunk_and_a_micro_batch(rank_logs: list[RankEvents]) -> None:
    seen = Counter[str]()
    for rank in rank_logs:
        actions = [event for event in rank.events if event.axis == COMPUTE]
        for event in rank.events:
            if event.axis == COMPUTE or not event.step:
                continue
            around = [action for action in actions if action.start <= event.issue <= action.end]
            assert len(around) <= 1
            if around and around[0].name in "FB":
                assert (event.chunk, event.microbatch) == (around[0].chunk, around[0].microbatch)
            elif event.axis == "pp":
                assert event.chunk >= 0 and event.microbatch >= 0 and event.stage >= 0
            elif event.label.startswith("chunk "):
                assert re.match(rf"chunk {event.chunk}\b", event.label)
                assert (event.microbatch >= 0) == (event.name == "reduce_scatter")
            else:
                assert event.axis not in ("dp", "tied")
                assert (event.chunk, event.microbatch) == (around[0].chunk if around else -1, -1)
            seen[event.axis] += 1
    communicate = {event.axis for rank in rank_logs for event in rank.events if event.step and event.axis != COMPUTE}
    assert set(seen) == communicate


def test_every_step_has_every_action(rank_logs: list[RankEvents]) -> None:
    for rank in rank_logs:
        for step in (1, 2):
            found = Counter((e.name, e.chunk, e.microbatch) for e in rank.events if e.step == step and not e.group)
            forwards = {place[1:] for place in found if place[0] == "F"}
            assert {place[1:] for place in found if place[0] == "B"} == forwards
            assert {microbatch for _, microbatch in forwards} == set(range(4))
            assert found["grad_norm", -1, -1] == 1
            assert {chunk for name, chunk, _ in found if name == "update"} == {chunk for chunk, _ in forwards}
            assert all(count == 1 for (name, *_), count in found.items() if name in "FB")


def test_the_traffic_of_a_step_is_the_sum_of_its_events(rank_logs: list[RankEvents]) -> None:
    for rank in rank_logs:
        for step, (start, end, traffic) in enumerate(rank.steps, 1):
            told = told_by([event for event in rank.events if event.step == step])
            for axis in {*told, *traffic}:
                found, expected = traffic.get(axis, Traffic()), told.get(axis, Traffic())
                assert (found.calls, found.bytes) == (expected.calls, expected.bytes)
                during = sum(high - low for on, low, high in rank.waits if on == axis and start <= low and high <= end)
                assert found.exposed_s == pytest.approx(during), "waits count in the step that waits"
        assert any(traffic.exposed_s > 0 for traffic in rank.steps[0][2].values())


def communication(rank: Rank, configs: list[RunConfig]) -> list[tuple[list[dict[str, dict[str, float]]], int]]:
    """By configuration: `communication` of the step metrics, and the number of communications in the event log."""
    from megascale.record.metrics import MetricsRecord, StepMetrics
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter

    class Listener:
        name = "a listener"

        def __init__(self) -> None:
            self.said: list[dict[str, dict[str, float]]] = []

        def write(self, record: MetricsRecord) -> None:
            if isinstance(record, StepMetrics):
                self.said.append(record.communication)

        def write_message(self, text: str) -> None: ...

        def close(self) -> None: ...

    found = []
    for config in configs:
        run, listener = build_run(rank, config), Listener()
        train(run, Reporter(config, run.device, None, [listener], run.mesh.recorder))
        calls = sum(bool(event.group) for event in recorded_events(run.mesh.recorder))
        found.append((listener.said, calls))
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[list[dict[str, dict[str, float]]], int]]]:
    """`communication` on two ranks of a plain run, of one with evaluations, and of one with fewer records."""
    folder = tmp_path_factory.mktemp("said")
    more = {"parallel__tp": 2, "train__steps": 4, "train__precision": "fp32", "train__eval_steps": 1}
    more["batch__global"] = 2
    each = ({"train__eval_every": 0}, {"train__eval_every": 1}, {"train__eval_every": 0, "train__log_every": 100})
    return run_world(2, communication, [config_of(settings(GPT, folder, **more, **own), folder) for own in each])


def test_an_evaluation_is_no_part_of_a_steps_metrics(said: list[Any]) -> None:
    for (plain, calls), (evaluated, calls_with_evaluations), _ in said:
        assert calls_with_evaluations > calls + 20
        assert len(plain) == 4
        for record in (*plain, *evaluated):
            assert record.keys() == plain[0].keys() == {"tp", "world"}
            for axis, numbers in record.items():
                assert {"calls", "bytes", "exposed_s"} == numbers.keys()
                assert (numbers["calls"], numbers["bytes"]) == (plain[0][axis]["calls"], plain[0][axis]["bytes"])
                assert numbers["calls"] > 0 and numbers["exposed_s"] > 0


def test_a_record_of_several_steps_has_their_mean(said: list[Any]) -> None:
    for (plain, _), _, (seldom, _) in said:
        assert len(seldom) == 2  # after the first step, and after the last
        for record in seldom:
            for axis, numbers in record.items():
                assert (numbers["calls"], numbers["bytes"]) == (plain[0][axis]["calls"], plain[0][axis]["bytes"])


def test_an_action_s_exposed_time_is_that_of_the_waits_inside() -> None:
    clock = Clock()
    recorder = in_a_step(clock)
    with recorder.action("B"):
        clock.now = 2.0
        work = begin(recorder)
        with recorder.action("update"):
            clock.now = 3.0
        start = recorder.mark()
        clock.now = 7.0
        work.wait(start)
    begin(recorder).wait(5.0)
    drained, _ = drain(recorder)
    exposed = {round(float(e["start"])): float(e["exposed"]) for e in drained.events if e["sequence"] < 0}
    assert exposed == {0: 4.0, 2: 0.0}


def test_activities_of_the_host_are_recorded_and_wait_for_no_device() -> None:
    recorder = Recorder(enabled=False)
    recorder.window = 7
    recorder.record_activity("gc", 1.0, 3.0)
    recorder.record_activity("data", 3.0, 3.5, until=4.0)  # the device works until then
    recorder.record_activity("data", 3.0, 3.5, until=3.375)
    recorder.record_activity("gc", 4.0, 4.00001)  # too short
    with recorder.activity(Phase.EVALUATION):
        time.sleep(2e-4)
    drained, texts = drain(recorder)
    assert [texts[e["name"]] for e in drained.events] == ["gc", "data", "data", "evaluation"]
    assert drained.events["exposed"][:3].tolist() == [2.0, 0.0, 0.125]
    assert set(drained.events["step"].tolist()) == {7}
    seconds = recorder.take_activities()
    assert (seconds["gc"], seconds["data"]) == (2.0, 0.125) and seconds["evaluation"] >= 2e-4
    assert recorder.take_activities() == {}
