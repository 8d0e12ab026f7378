"""Communication that goes on while its rank computes: it ends in order, with nobody waiting, and says what failed."""

from __future__ import annotations

import datetime
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from megascale.comm.group import Group, TrackedWork
from megascale.comm.progress import GlooWork, ProgressThread, work_wrapper
from megascale.comm.work import COMPLETED
from megascale.core.rank import Rank
from megascale.device import StreamTimer
from megascale.record.events import Event
from megascale.record.recorder import HostTimer, Recorder
from tests.recorded_events import recorded_events
from tests.runs import send_messages
from tests.worlds import run_world

SECONDS = 60
"""What is not done by then is stuck."""


def until(condition: Callable[[], bool]) -> None:
    """Return when it holds."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(1e-3)


class Work:
    """A work that is done when the test says so."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def wait(self) -> None:
        assert self.done.wait(SECONDS), "it was never done"


class Tensor:
    """What a work holds on to."""


def in_background(progress: ProgressThread, work: Any, finish: Callable[[], Any] | None = None) -> Any:
    return GlooWork([work], finish, progress).in_background()


def test_a_channel_goes_on_by_itself_and_in_order() -> None:
    progress, works = ProgressThread("test"), [Work() for _ in range(4)]
    finished: list[int] = []
    followed = [in_background(progress, work, partial(finished.append, i)) for i, work in enumerate(works)]
    for last in (3, 2, 1):
        works[last].done.set()
    time.sleep(0.05)
    assert finished == [] and all(each.completed_at is None for each in followed), "the first is not done"
    works[0].done.set()
    until(lambda: followed[-1].completed_at is not None)
    assert finished == [0, 1, 2, 3]
    ended = [each.completed_at for each in followed]
    assert ended == sorted(ended)
    for each in followed:
        each.wait()
    assert finished == [0, 1, 2, 3], "nothing is carried out twice"


def test_channels_do_not_wait_for_each_other() -> None:
    stuck = in_background(ProgressThread("one"), Work())
    free = Work()
    free.done.set()
    in_background(ProgressThread("other"), free).wait()
    assert stuck.completed_at is None


def test_a_thread_starts_with_the_first_communication_and_does_not_keep_the_process() -> None:
    progress = ProgressThread("a channel of its own")

    def named() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "a channel of its own"]

    assert named() == []
    for _ in range(3):
        in_background(progress, None).wait()
    assert [thread.daemon for thread in named()] == [True]


def test_without_a_background_the_caller_does_it() -> None:
    work: Any = Work()
    finished: list[threading.Thread] = []
    work.done.set()
    messages = GlooWork([None, work], lambda: finished.append(threading.current_thread()), ProgressThread("test"))
    messages.wait()
    assert finished == [threading.current_thread()] and messages.completed_at is None


def test_an_error_is_raised_in_the_thread_that_waits() -> None:
    progress, error, work = ProgressThread("test"), ConnectionError("a rank has gone"), Work()

    def fail() -> None:
        raise error

    followed = in_background(progress, work, fail)
    after = in_background(progress, None)
    work.done.set()
    after.wait()  # the channel goes on
    for _ in range(2):  # for each who waits
        with pytest.raises(ConnectionError) as raised:
            followed.wait()
        assert raised.value is error


def begin(recorder: Recorder, start: Callable[[], Any], *, wait: bool = False) -> TrackedWork:
    return Group("test", (0, 1), 0, recorder=recorder).issue("send", "", 8, start, wait=wait)


def test_a_communication_that_failed_is_never_done() -> None:
    """Who asks whether it is done, and lets go of it then, would not hear of the error."""
    follow, recorder = work_wrapper("test", HostTimer()), Recorder()
    recorder.step = 1

    def fail() -> None:
        raise ConnectionError

    begun = begin(recorder, lambda: follow([], fail))
    begin(recorder, lambda: follow([], None)).wait()  # in the same channel: the first has been carried out
    assert not begun.is_completed()
    with pytest.raises(ConnectionError):
        begun.wait()
    assert [event.sequence for event in recorded_events(recorder)] == [1]


def test_done_does_not_wait() -> None:
    follow, recorder = work_wrapper("test", HostTimer()), Recorder()
    recorder.step = 1
    work: Any = Work()
    begun = begin(recorder, lambda: follow([work], None))
    assert not begun.is_completed() and recorded_events(recorder) == []
    work.done.set()
    until(begun.is_completed)
    (event,) = recorded_events(recorder)
    [(waited, _)] = begun._record.waits
    assert waited == event.issue, "compute waited while it was issued, and not again"
    traffic = recorder.take_traffic()
    begun.wait()
    assert begun.is_completed() and traffic["test"].exposed_s == event.exposed and recorder.take_traffic() == {}


def test_a_second_wait_is_none() -> None:
    recorder, waited = Recorder(), []
    messages = GlooWork([], lambda: waited.append(1), ProgressThread("test"))
    begun = begin(recorder, lambda: messages, wait=True)
    begun.wait()
    assert waited == [1] and begun.is_completed()
    assert len(recorded_events(recorder)[0].waits) == 1


class WatchingTimer(StreamTimer):
    """A timer of streams that have done all their work, with the channels that it has watched."""

    def __init__(self) -> None:
        self.watched: list[Any] = []

    def mark(self) -> Any:
        return 0.0

    def completion_mark(self, works: Any, channel: Any) -> Any:
        self.watched.append(channel)
        return 0.0

    def seconds(self, mark: Any) -> float:
        return float(mark)


@pytest.mark.parametrize("wait", [True, False])
def test_a_stream_watches_what_goes_on_in_the_background_alone(wait: bool) -> None:
    timer = WatchingTimer()
    begin(Recorder(timer), lambda: work_wrapper("dp", timer)([], None), wait=wait).wait()
    assert timer.watched == ([] if wait else ["dp"])


def test_what_is_done_lets_go_of_its_tensors() -> None:
    progress, work, tensor = ProgressThread("test"), Work(), Tensor()
    there = weakref.ref(tensor)
    followed = in_background(progress, work, partial(id, tensor))
    del tensor
    assert there() is not None, "it is needed until then"
    work.done.set()
    until(lambda: followed.completed_at is not None)
    assert there() is None


def test_a_communication_keeps_its_tensors_until_it_is_waited_for() -> None:
    """The works of a GPU let go of them when a stream waits, though that may be another than the one that computes."""
    tensor = Tensor()
    there = weakref.ref(tensor)
    begun = begin(Recorder(), partial(lambda tensor: COMPLETED, tensor))
    del tensor
    assert there() is not None
    begun.wait()
    assert there() is None


# Real messages.


def group_of(rank: Rank, transport: str) -> Group:
    from megascale.comm.open_group import open_group

    group = open_group("test", range(rank.world_size), rank.rank, Recorder(), slot_bytes=1 << 12)
    if transport != "shared":
        send_messages(group, backend=transport == "gloo")
    return group


def nobody_waits(rank: Rank, transport: str, count: int) -> bool:
    """Whether an all-reduce ends on every rank though none waits for it."""
    import torch

    from megascale.comm.collectives import all_reduce

    tensor = torch.full((count,), float(rank.rank + 1))
    begun = all_reduce(group_of(rank, transport), tensor, wait=False)
    assert isinstance(begun, TrackedWork)
    until(begun.is_completed)
    return bool((tensor == sum(range(rank.world_size + 1))).all())


@pytest.mark.parametrize("count", [10, 100_000])  # the larger has a second round of messages
@pytest.mark.parametrize("transport", ["exchange", "gloo"])
def test_a_collective_ends_before_anyone_waits(transport: str, count: int) -> None:
    assert run_world(3, nobody_waits, transport, count) == [True] * 3


def ends_where_it_is_waited_for(rank: Rank) -> list[bool]:
    """Whether an all-reduce through shared memory is done before the wait for it, and after."""
    import torch
    import torch.distributed as dist

    from megascale.comm.collectives import all_reduce

    begun = all_reduce(group_of(rank, "shared"), torch.ones(4), wait=False)
    assert isinstance(begun, TrackedWork)
    dist.barrier()  # all have put their parts out
    found = [begun.is_completed()]
    begun.wait()
    return [*found, begun.is_completed()]


def test_in_shared_memory_nothing_travels_meanwhile() -> None:
    assert run_world(2, ends_where_it_is_waited_for) == [[False, True]] * 2


def messages_of(rank: Rank, timeout: datetime.timedelta) -> tuple[Group, Callable[..., TrackedWork]]:
    """Two ranks' group, and what starts a message from the other rank, or to it."""
    import torch.distributed as dist

    process_group = dist.new_group([0, 1], timeout=timeout)
    group, follow = Group("pp.up", (0, 1), rank.rank, process_group), work_wrapper("pp.up", HostTimer())
    other = 1 - rank.rank

    def message(call: Any, tensor: Any) -> TrackedWork:
        def start() -> Any:
            return follow([call(tensor, other, group=process_group)], None)

        name = "send" if call is dist.isend else "receive"
        return group.issue(name, "", tensor.nbytes, start, wait=False, peer=other)

    return group, message


def wait_in_vain(rank: Rank) -> str:
    """What rank 0 hears of a message that never comes."""
    import torch
    import torch.distributed as dist

    _, message = messages_of(rank, datetime.timedelta(seconds=0.5))
    if rank.rank == 1:
        return ""
    begun = message(dist.irecv, torch.empty(4))
    with pytest.raises(RuntimeError) as raised:
        begun.wait()
    assert not begun.is_completed()
    return f"{raised.value}"


def test_a_message_that_never_comes_is_an_error_of_the_backend() -> None:
    assert "Timed out waiting 500ms" in run_world(2, wait_in_vain)[0]


def lets_go(rank: Rank) -> list[bool]:
    """Whether a tensor that only its message holds exists before its message has arrived, and after."""
    import torch
    import torch.distributed as dist

    _, message = messages_of(rank, datetime.timedelta(seconds=SECONDS))
    tensor = torch.ones(1 << 20)  # more than what the kernel takes
    there = weakref.ref(tensor)
    if rank.rank == 1:
        dist.barrier()
        message(dist.irecv, tensor).wait()
        return []
    begun = message(dist.isend, tensor)
    del tensor
    found = [there() is not None]
    dist.barrier()
    until(begun.is_completed)
    return [*found, there() is not None]


def test_what_has_been_sent_is_let_go_of() -> None:
    assert run_world(2, lets_go)[0] == [True, False]


LATE, COMPUTE = 0.3, 0.6
"""Seconds."""


def receive(rank: Rank, compute: float) -> list[Event]:
    """Rank 1 sends LATE seconds late; rank 0 computes for a while before it waits."""
    import torch
    import torch.distributed as dist

    group, message = messages_of(rank, datetime.timedelta(seconds=SECONDS))
    message(dist.isend, torch.ones(1))
    message(dist.irecv, torch.ones(1)).wait()  # the ranks are connected
    dist.barrier()
    if rank.rank == 1:
        time.sleep(LATE)
        message(dist.isend, torch.ones(4)).wait()
    else:
        begun = message(dist.irecv, torch.empty(4))
        time.sleep(compute)
        begun.wait()
    events = recorded_events(group.recorder)
    if rank.rank == 0:
        events[-1] = replace(events[-1], waits=tuple(begun._record.waits))
    return events


def test_a_wait_that_is_hidden_is_not_exposed() -> None:
    event = run_world(2, receive, COMPUTE)[0][-1]
    assert (event.name, event.axis, event.peer) == ("receive", "pp", 1)
    assert event.exposed < LATE / 4
    (_, issued), (start, _) = event.waits
    assert issued < event.end < start, "it ended when it was there, not when it was waited for"
    assert event.end - event.issue > LATE * 0.8


def test_a_wait_that_is_not_hidden_is() -> None:
    event = run_world(2, receive, 0.0)[0][-1]
    (_, issued), (start, end) = event.waits
    assert issued <= start < event.end <= end
    assert event.exposed > LATE * 0.8
