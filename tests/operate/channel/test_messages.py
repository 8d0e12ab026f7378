"""Messages of driver and agents: the same on both ends of the wire, and nothing else is taken."""

from __future__ import annotations

import math

import pytest

from megascale.core.run_folder import RunFolder
from megascale.operate.channel.messages import (
    Check,
    CheckDone,
    Collect,
    Heartbeat,
    Hello,
    Leave,
    Message,
    MessageError,
    OpenStore,
    RankEnd,
    RanksEnded,
    Records,
    Stacks,
    Start,
    Stop,
    StoreOpened,
    Welcome,
    from_json,
    to_json,
)
from megascale.record.rank_state import RankStatus

MESSAGES: tuple[Message, ...] = (
    Hello("n0", "host", "10.0.0.1", 8),
    Hello("n0", "host", "10.0.0.1", 8, 3, (8, 9), observer=True, started=12.5),
    Heartbeat(1.5, 3, (RankStatus(8, 123, "step", 17, 1 << 40, 0.25, state="S", rss=1 << 33),), {"cpu": 0.5}),
    RanksEnded(3, (RankEnd(8, -9, 1.5), RankEnd(9, 1, 1.6, "lost é", "LostPeerError", True, (8,), (9,), 1)), (10,)),
    StoreOpened(3, "10.0.0.1:4000"),
    Records(3, {8: {"step": 17, "groups": {"dp": [1, None]}}}, {8: "T"}),
    Stacks(3, {8: "Thread 1\n  main"}),
    CheckDone(4, "gemm", {"rate": [1.5, 2.5]}),
    Welcome(1.0, 0.25, 300.0, 60.0),
    OpenStore(3),
    Start(3, "run", 16, (8, 9), "10.0.0.1:4000", ("train", "a.toml", "name=x y"), "/runs/logs", {"A": "b"}),
    Start(
        4, "run", 1, (0,), "10.0.0.1:4000", (), "/runs/logs", {}, RunFolder("/runs/r", "id\nstart", "c", "/shm", 9.5)
    ),
    Stop(3, 2.5),
    Collect(3, stacks=True, ranks=(8,)),
    Check(4, "gemm", {"size": 64}),
    Leave("the job has ended"),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    assert from_json(to_json(message)) == message


def test_a_figure_that_is_not_finite_arrives() -> None:
    beat = from_json(to_json(Heartbeat(1.0, host={"load": math.inf, "offset": math.nan})))
    assert isinstance(beat, Heartbeat)
    assert beat.host is not None
    assert beat.host["load"] == math.inf
    assert math.isnan(beat.host["offset"])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "unknown kind b''"),
        (b"Message {}", "unknown kind b'Message'"),
        (b"Stop", "Stop of unknown form"),
        (b'Stop {"attempt": 3}', "grace_s: Field required"),
        (b'Leave {"reason": "x", "colour": "red"}', "colour: Unexpected"),
        (b'Leave {"reason": 4}', "reason: Input should be a valid string"),
        (b'RanksEnded {"attempt": 1, "ends": [{"rank": 1}]}', "ends.0.status: Field required"),
        (b'Heartbeat {"time": 1.0, "ranks": [{"rank": 1, "pid": 2, "name": 3}]}', "ranks.0.name: Extra inputs"),
    ],
)
def test_anything_else_is_refused(data: bytes, expected: str) -> None:
    with pytest.raises(MessageError) as refused:
        from_json(data)
    assert expected in str(refused.value)
