"""A job that is only observed: incidents are logged, nothing is restarted, and the ranks' launcher decides."""

from __future__ import annotations

from typing import Any

from megascale.config.fault import FaultConfig
from megascale.core.flight_reader import parse_flight_record
from megascale.core.flight_writer import FlightIdentity, FlightRecordWriter
from megascale.fault.commands import Command, Finish, Say, Send
from megascale.fault.incidents import JobHistory
from megascale.fault.job import Job, JobPlan
from megascale.fault.messages import Collect, Heartbeat, Hello, Leave, RankEnd, RanksEnded, RankStatus, Records
from megascale.fault.simulation import HangVerdict
from megascale.fault.stages import RANKS_S

PLAN = JobPlan("run", 0, 2, (), "/logs", revivable=False, observes=True)
VERDICT = HangVerdict("data", (1,), "dp", ("rank 1 is in phase data",))


class Observed:
    """An observed job of two hosts with a rank each, driven message by message."""

    def __init__(self) -> None:
        settings = FaultConfig(stacks=False)
        self.job = Job(PLAN, settings, JobHistory(attempt=4), lambda records, states: VERDICT, 0.0)
        self.now = 0.0
        self.done: list[Command] = []
        for node in "ab":
            self.send(node, Hello(node, node, node, 1, observer=True))

    def send(self, node: str, message: Any) -> None:
        self.done += self.job.receive(node, message, self.now)

    def pass_time(self, seconds: float) -> None:
        """Advance step by step, as the driver does; the agents have nothing new to say."""
        for _ in range(round(seconds)):
            self.now += 1.0
            self.done += self.job.tick(self.now)

    def beat(self, step: int, idle: float = 0.0, attempts: tuple[int, int] = (0, 0), nodes: str = "ab") -> None:
        for node in nodes:
            rank = "ab".index(node)
            status = RankStatus(rank, 1, "step", step, step, idle, step_time_s=0.1, first_step=1)
            self.send(node, Heartbeat(self.now, attempts[rank], (status,)))

    def answer(self, *numbers: int) -> None:
        content = bytes(FlightRecordWriter(FlightIdentity("run", 0, 2))._memory)
        record = parse_flight_record(content, 1, "record").to_dict()
        for rank, number in enumerate(numbers):
            self.send("ab"[rank], Records(number, {rank: record}, {rank: "S"}))

    @property
    def incidents(self) -> list[Any]:
        return list(self.job.history.incidents.values())


def trained() -> Observed:
    job = Observed()
    job.beat(1)
    job.beat(3)
    return job


def test_every_rank_is_watched_before_there_is_a_verdict() -> None:
    job = Observed()
    for _ in range(70):
        job.now += 1.0
        job.beat(1, nodes="a")
        job.send("b", Heartbeat(job.now, None, ()))
    assert job.job.stage == "gather"
    said = [command.text for command in job.done if isinstance(command, Say)]
    assert len(said) == 1 and "1 of 2 ranks are watched" in said[0]
    job.beat(1)
    assert (job.job.stage, job.job.history.attempt) == ("run", 5)


def test_a_hang_is_an_incident_and_ends_when_the_ranks_go_on() -> None:
    job = trained()
    job.now = 6.0
    job.beat(3, idle=5.0)
    asked = [command.message for command in job.done if isinstance(command, Send)]
    assert [m for m in asked if isinstance(m, Collect)] == [Collect(0), Collect(0)]
    job.answer(0, 0)
    (incident,) = job.incidents
    assert (incident.class_, incident.culprit.ranks, incident.action.kind) == ("hang", (1,), "observe")
    assert incident.recovered is None
    job.now = 30.0
    job.beat(4)
    assert job.incidents[0].recovered == 30.0
    assert job.job.stage == "run"
    assert not [
        c for c in job.done if isinstance(c, Send) and type(c.message).__name__ in ("Stop", "Start", "OpenStore")
    ]


def test_ranks_that_their_launcher_starts_again_are_a_new_attempt() -> None:
    """Also where the agents count the starts differently, because one of them joined later."""
    job = trained()
    job.send("b", RanksEnded(0, (RankEnd(1, -9, 1.0, patterns=("status_unknown",)),)))
    job.send("a", RanksEnded(0, (RankEnd(0, 1, 1.2, error="lost rank 1", peer_lost=True),)))
    job.pass_time(2)
    (incident,) = job.incidents
    assert (incident.class_, incident.culprit.ranks, incident.action.kind) == ("process", (1,), "observe")
    job.beat(3, attempts=(1, 2))
    assert (job.job.stage, job.job.history.attempt) == ("run", 6)
    job.now += 1.0
    job.beat(4, attempts=(1, 2))
    assert job.incidents[0].recovered is not None
    job.now += 5.0
    job.beat(4, idle=5.0, attempts=(1, 2))
    job.answer(1, 2)
    assert [one.class_ for one in job.incidents] == ["process", "hang"]


def test_the_end_of_the_job_is_the_end_of_its_observers() -> None:
    job = trained()
    for rank, node in enumerate("ab"):
        job.send(node, RanksEnded(0, (RankEnd(rank, 0, 1.0, in_order=True),)))
    assert Finish(0) in job.done
    assert len([c for c in job.done if isinstance(c, Send) and isinstance(c.message, Leave)]) == 2


def test_a_job_that_failed_and_is_not_started_again_has_ended() -> None:
    job = trained()
    job.send("b", RanksEnded(0, (RankEnd(1, 1, 1.0, error="a bad value", error_kind="OSError"),)))
    for node in "ab":
        job.send(node, Heartbeat(job.now, None, ()))
    for _ in range(int(RANKS_S) + 3):
        job.now += 1.0
        for node in "ab":
            job.send(node, Heartbeat(job.now, None, ()))
    assert Finish(1) in job.done
    assert len(job.incidents) == 1


def test_an_agent_that_comes_back_watches_on() -> None:
    job = trained()
    for _ in range(8):
        job.now += 1.0
        job.beat(3 + int(job.now), nodes="a")
    job.pass_time(1)
    assert [one.class_ for one in job.incidents] == ["node"]
    job.send("b", Hello("b", "b", "b", 1, observer=True))
    job.beat(20)
    assert (job.job.stage, job.job.history.attempt) == ("run", 6)
