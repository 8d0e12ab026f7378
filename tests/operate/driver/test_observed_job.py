"""Jobs of other launchers: the driver of observers names culprits, and does nothing about them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from megascale.cli.main import main
from megascale.cli.watch import PORT
from megascale.cli.watch_attach import DriverEndpoint, _configuration, _driver_endpoint, _reserve
from megascale.config.fault import FaultConfig
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, Exit
from megascale.core.network import LOOPBACK
from megascale.core.rank import Rank
from megascale.operate.channel.driver_server import DriverServer
from megascale.operate.channel.messages import (
    Collect,
    Heartbeat,
    Hello,
    Leave,
    RankEnd,
    RanksEnded,
    Records,
    Welcome,
)
from megascale.operate.diagnose.hang.hang import Verdict
from megascale.operate.driver.attempt_stages import FIND_S
from megascale.operate.driver.commands import Finish, Log, Say, Send
from megascale.operate.driver.incidents import LOG_FILE, JobHistory, read_history
from megascale.operate.driver.job import Job
from megascale.operate.driver.job_state import JobPlan, Stage
from megascale.operate.driver.live_job import live_state
from megascale.record.log_files import log_of_rank
from megascale.record.rank_state import RankStatus
from tests.jobs import SECONDS, heed_signals, job_config
from tests.operate.driver.test_one_host import with_planted
from tests.operate.node.test_torchrun import Torchrun, free_port
from tests.operate.show.folders import make_run
from tests.runs import GPT


class Observed:
    """A job of two hosts with a rank each, by another launcher. `said`: lines for people."""

    def __init__(self) -> None:
        verdict = Verdict("stopped", (1,))
        plan = JobPlan("run", 0, 0, (), "/logs", revivable=False, observed=True)
        self.job = Job(plan, FaultConfig(agent_grace_s=60.0), JobHistory(), 0.0)
        self.job.hang_verdict = lambda records, states: verdict
        self.sent: list[Send] = []
        self.said: list[str] = []
        self.status: int | None = None
        for node in "ab":
            self.join(node, 0.0)

    def take(self, commands: object) -> None:
        assert isinstance(commands, list)
        for command in commands:
            assert isinstance(command, Send | Say | Log | Finish), command
            if isinstance(command, Send):
                assert isinstance(command.message, Welcome | Collect | Leave), command
                self.sent.append(command)
            elif isinstance(command, Say):
                self.said.append(command.text)
            elif isinstance(command, Finish):
                self.status = command.status

    def beat(self, now: float, step: int, idle_s: float = 0.0, pid: int = 10, nodes: str = "ab") -> None:
        """Hosts say what their rank does."""
        for node in nodes:
            self.show(now, node, {"ab".index(node): pid + "ab".index(node)}, 2, step, idle_s)
        self.take(self.job.tick(now + 0.3))

    def show(self, now: float, node: str, pids: Mapping[int, int], world: int, step: int, idle_s: float = 0.0) -> None:
        """A host says what its ranks, of a job of `world`, do."""
        ranks = tuple(RankStatus(rank, pid, "step", step, step, idle_s, 0.0, 0.5, 1) for rank, pid in pids.items())
        self.take(self.job.receive(node, Heartbeat(now, 7 if ranks else None, ranks, world=world), now))

    def wait(self, since: float, until: float) -> None:
        """Both hosts have no rank that runs."""
        for now in (since + tick / 2 for tick in range(round(2 * (until - since)))):
            for node in "ab":
                self.take(self.job.receive(node, Heartbeat(now, None, (), world=2), now))
            self.take(self.job.tick(now))

    def join(self, node: str, now: float) -> None:
        self.take(self.job.receive(node, Hello(node, node, node, 1, observer=True), now))

    def end(self, now: float, rank: int, status: int, *, in_order: bool = False) -> None:
        node, end = "ab"[rank], RankEnd(rank, status, now, in_order=in_order)
        self.take(self.job.receive(node, RanksEnded(7, (end,)), now))
        self.take(self.job.receive(node, Heartbeat(now, None, (), world=2), now))

    @property
    def incidents(self) -> list[tuple[str, tuple[int, ...], str]]:
        return [(i.class_, i.culprit.ranks, i.action.kind) for i in self.job.history.incidents.values()]


def test_a_hang_is_named_once_and_its_end_is_said() -> None:
    job = Observed()
    job.beat(1.0, 5)
    assert job.job.stage == Stage.RUN
    job.beat(2.0, 6)
    job.beat(7.0, 6, idle_s=5.0)
    assert {send.node for send in job.sent if isinstance(send.message, Collect)} == {"a", "b"}
    for node in "ab":
        job.take(job.job.receive(node, Records(3, {}, {}), 7.1))
    for now in range(8, 20):
        job.beat(float(now), 6, idle_s=now - 2.0)
    assert job.incidents == [("hang", (1,), "alert")]
    job.beat(20.0, 7)
    assert job.said[-1] == "the ranks make progress again"
    assert job.job.stage == Stage.RUN


def test_the_first_rank_that_died_is_named_and_the_next_attempt_is_watched() -> None:
    job = Observed()
    job.beat(1.0, 5)
    job.end(2.0, 1, -signal.SIGKILL)
    job.end(2.1, 0, -signal.SIGTERM)
    job.wait(2.5, 10.0)
    assert job.incidents == [("process", (1,), "alert")]
    job.beat(20.0, 4, pid=30)
    assert (job.job.stage, job.job.history.attempt) == (Stage.RUN, 1)
    job.end(21.0, 0, 0, in_order=True)
    job.end(21.0, 1, 0, in_order=True)
    assert job.status == 0
    assert job.incidents == [("process", (1,), "alert")]


@pytest.mark.parametrize("seen", ["", "a"], ids=["no rank", "one rank"])
@pytest.mark.parametrize("failed", [False, True])
def test_a_job_that_is_over_before_all_its_ranks_are_found_ends(seen: str, *, failed: bool) -> None:
    """Ranks of a short job end before the others are found, or before the driver hears of any."""
    job = Observed()
    for node in seen:
        job.show(1.0, node, {0: 10}, 2, 5)
    job.end(1.5, 1, -signal.SIGKILL if failed else 0, in_order=not failed)
    job.take(job.job.tick(1.9))
    job.end(2.0, 0, 0, in_order=not failed)
    job.wait(2.5, 70.0)
    assert job.incidents == ([("process", (1,), "alert")] if failed else [])
    assert job.status == (Exit.UNCLASSIFIED if failed else 0)


def test_a_rank_that_died_before_all_were_found_is_named_and_the_next_attempt_is_watched() -> None:
    job = Observed()
    job.end(1.0, 1, -signal.SIGKILL)
    job.wait(1.5, 3.0)
    for now in (4.0, 5.0):
        job.beat(now, 1)
    assert (job.job.stage, job.incidents) == (Stage.RUN, [("process", (1,), "alert")])
    job.end(6.0, 0, 0, in_order=True)
    job.end(6.0, 1, 0, in_order=True)
    assert job.status == 0


def test_observers_leave_when_the_launcher_does_not_start_the_ranks_again() -> None:
    job = Observed()
    job.beat(1.0, 5)
    job.end(2.0, 1, -signal.SIGKILL)
    job.end(2.0, 0, -signal.SIGTERM)
    job.wait(2.5, 50.0)
    assert job.status is None
    job.wait(50.0, 70.0)
    assert job.status == Exit.UNCLASSIFIED
    assert [send.node for send in job.sent if isinstance(send.message, Leave)] == ["a", "b"]


def lose_observer() -> Observed:
    """A job whose rank 1 lost its observer, and runs on."""
    job = Observed()
    for now in range(1, 12):
        job.beat(float(now), now, nodes="ab" if now < 4 else "a")
    assert job.incidents == [("node", (1,), "alert")]
    job.join("b", 12.0)
    return job


def test_ranks_whose_observer_comes_back_are_watched_again() -> None:
    job = lose_observer()
    job.beat(12.0, 12)
    assert (job.job.stage, job.job.history.attempt) == (Stage.RUN, 0)
    assert job.said[-1] == "the ranks on b are seen again: they have run on"
    for now in range(13, 25):
        job.beat(float(now), 12, idle_s=now - 12.0)
        for node in "ab":
            job.take(job.job.receive(node, Records(3, {}, {}), now + 0.4))
    assert job.incidents[1:] == [("hang", (1,), "alert")]
    job.beat(25.0, 13)
    job.end(26.0, 1, -signal.SIGKILL)
    job.end(26.1, 0, -signal.SIGTERM)
    job.wait(26.5, 30.0)
    assert job.incidents[2:] == [("process", (1,), "alert")]


def test_an_observer_that_comes_back_to_other_ranks_begins_an_attempt() -> None:
    job = lose_observer()
    job.beat(12.0, 3, pid=30)
    assert (job.job.stage, job.job.history.attempt) == (Stage.RUN, 1)


def test_a_job_that_restarts_with_fewer_ranks_is_watched() -> None:
    """The second host has none of them, and knows only the ranks it had."""
    job = Observed()
    job.beat(1.0, 5)
    job.end(2.0, 1, -signal.SIGKILL)
    job.end(2.1, 0, -signal.SIGTERM)
    job.wait(2.5, 5.0)
    job.show(6.0, "a", {0: 30}, 1, 4)
    job.show(6.0, "b", {}, 2, 0)
    job.take(job.job.tick(6.3))
    assert (job.job.stage, job.job.history.attempt, job.job.plan.world) == (Stage.RUN, 1, 1)


def test_ranks_that_no_observer_finds_are_said_once() -> None:
    job = Observed()
    for now in range(1, 60):
        job.show(float(now), "b", {}, 0, 0)
        job.beat(float(now), now, nodes="a")
        assert len(job.said) == (now > FIND_S), now
    assert job.said[0].startswith("found 1 of 2 ranks, on a: none is watched before all are found  -> run")
    assert job.job.attempt is None
    job.beat(60.0, 60)
    assert job.job.stage == Stage.RUN


def test_ranks_that_are_left_of_an_attempt_are_no_new_job() -> None:
    job = Observed()
    job.beat(1.0, 5)
    job.end(2.0, 1, -signal.SIGKILL)
    for now in range(3, 60):
        job.take(job.job.receive("b", Heartbeat(float(now), None, (), world=2), float(now)))
        job.beat(float(now), 5, idle_s=now - 2.0, nodes="a")
    assert job.incidents == [("process", (1,), "alert")]
    assert not [line for line in job.said if "found 1 of 2" in line]


def test_ends_of_ranks_that_the_attempt_does_not_have_are_not_its_ends() -> None:
    """The launcher starts more ranks, and one ends before the driver knows them all."""
    job = Observed()
    job.beat(1.0, 5)
    job.end(2.0, 1, -signal.SIGKILL)
    job.take(job.job.receive("b", RanksEnded(8, (RankEnd(3, 1, 3.0),)), 3.0))
    assert job.job.attempt is not None
    assert set(job.job.attempt.ends) == {1}
    assert len(live_state(job.job, 3.0).ranks) == 2


def test_a_stop_of_the_observers_leaves_the_ranks_alone() -> None:
    job = Observed()
    job.beat(1.0, 5)
    job.take(job.job.request_stop(2.0))
    assert job.status == Exit.STOPPED
    assert job.job.request_stop(3.0) == [], "the job has ended once"


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("127.0.0.2", ("127.0.0.2", "127.0.0.2", PORT)),
        ("127.0.0.2:31000", ("127.0.0.2", "127.0.0.2", 31000)),
        ("localhost", ("localhost", "127.0.0.1", PORT)),
        ("[::1]", ("::1", "::1", PORT)),
        ("[::1]:31000", ("::1", "::1", 31000)),
    ],
)
def test_endpoints_of_the_driver(text: str, endpoint: tuple[str, str, int]) -> None:
    assert _driver_endpoint(text) == endpoint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("127.0.0.1:99999", "there is no port 99999 that other hosts could know  -> a port from 1 to 65535"),
        ("127.0.0.1:0", "there is no port 0 that other hosts could know"),
        ("::1:29600", r"is no HOST\[:PORT\]  -> such as node1:29600, or \[fd00::1\]:29600 with an address of IPv6"),
        ("::1", "such as node1:29600, or"),
        ("127.0.0.1:", "such as node1:29600, or"),
        ("127.0.0.1:port", "such as node1:29600, or"),
        ("", "such as node1:29600, or"),
        ("[127.0.0.1]:29600", "a host of the job, such as node1:29600"),
        (f"{'a' * 70}.b:29600", "a host of the job, such as node1:29600"),
    ],
)
def test_what_is_no_endpoint_of_a_driver_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _driver_endpoint(text)


def test_two_drivers_share_no_port() -> None:
    """The kernel would spread the observers over both."""
    driver = DriverEndpoint(LOOPBACK, LOOPBACK, free_port())
    with _reserve(driver) or pytest.fail("the driver's host does not have its address"):
        for other in (driver, driver._replace(name="node1")):
            with pytest.raises(ConfigError, match=r"cannot listen at .*: Address already in use  -> another port than"):
                _reserve(other)
    with _reserve(driver) or pytest.fail("the port is free again"):
        pass


def test_the_driver_of_a_host_that_is_loopback_to_itself_listens_for_others() -> None:
    """As on Debian, where a host's own name is 127.0.1.1."""
    driver = DriverEndpoint("node1", "127.0.1.1", free_port())

    async def connect() -> None:
        async with DriverServer(b"secret", driver.listens_at, driver.port):
            for host in ("127.0.1.1", "127.0.0.1", "127.0.0.2"):
                socket.create_connection((host, driver.port), 5.0).close()

    with _reserve(driver) or pytest.fail("the driver's host does not have its address"):
        asyncio.run(connect())
    assert DriverEndpoint("localhost", LOOPBACK, PORT).listens_at == LOOPBACK
    assert DriverEndpoint("node1", "10.0.0.1", PORT).listens_at == "10.0.0.1"


def test_a_host_without_the_driver_s_address_is_no_driver() -> None:
    assert _reserve(DriverEndpoint("node1", "203.0.113.9", PORT)) is None


def test_an_address_that_nothing_can_connect_to_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "run"), "--attach", "--driver", "255.255.255.255"]) == Exit.CONFIG
    error = capsys.readouterr().err
    assert "--driver: this host cannot connect to 255.255.255.255:29600: Permission denied  -> a host of" in error


def test_the_configuration_of_a_job_that_has_not_begun_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megascale.cli.watch_attach.LOOK_S", 0.01)
    run = make_run(tmp_path)
    file = run / "config.toml"
    text = file.read_text()
    file.unlink()

    async def begin() -> RunConfig | None:
        found = asyncio.create_task(_configuration(run))
        await asyncio.sleep(0.1)
        assert not found.done()
        file.write_text(text)
        return await found

    config = asyncio.run(begin())
    assert config is not None and config.fault == FaultConfig()
    assert capsys.readouterr().err == f"megascale: waiting for the job, which writes {file}\n"


def test_ranks_that_hang_before_the_first_step_are_watched_by_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megascale.cli.watch_attach.LOOK_S", 0.01)
    monkeypatch.setattr("megascale.cli.watch_attach.START_S", 0.1)
    folder = tmp_path / f"early-{tmp_path.name}"
    with log_of_rank(folder, Rank(0, 2, 0, "host"), {}):
        assert asyncio.run(_configuration(folder)) is None
    assert "the defaults of [fault] hold" in capsys.readouterr().err


def ranks_below(pid: int) -> dict[int, int]:
    """The process ids of the ranks that torchrun has started, by rank."""
    parents, ranks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            found = re.search(rb"\0RANK=(\d+)\0", (folder / "environ").read_bytes())
        except OSError:
            continue
        if found:
            ranks[int(folder.name)] = int(found[1])
    below = {child for child in parents if pid in (parents[child], parents.get(parents[child]))}
    return {rank: child for child, rank in ranks.items() if child in below and parents[child] not in ranks}


class ObservedTorchrun:
    """A job of two ranks that torchrun has started, and its observer beside it."""

    def __init__(self, folder: Path, **env: str) -> None:
        config = job_config(folder, GPT, parallel__tp=2, train__precision="fp32", train__steps=100_000)
        self._log = folder / "observe.log"
        self.job = Torchrun(config, "fault.agent_grace_s=20", env=env)
        words = ["watch", str(self.job.folder), "--attach", "--driver", f"127.0.0.1:{free_port()}"]
        with open(self._log, "w") as log:
            self.observer = subprocess.Popen(
                [sys.executable, "-m", "megascale", *words], stdout=log, stderr=log, preexec_fn=heed_signals
            )

    def __enter__(self) -> ObservedTorchrun:
        return self

    def __exit__(self, *error: object) -> None:
        self.observer.kill()
        self.observer.wait()
        if self.job.process.poll() is None:
            self.job.process.kill()

    def wait_for(self, text: str) -> str:
        """Return what the observer has said, once a pattern is found in it."""
        deadline = time.monotonic() + SECONDS
        while not re.search(text, said := self._log.read_text()):
            assert time.monotonic() < deadline, said
            assert self.observer.poll() is None, said
            time.sleep(0.1)
        return said

    def rank(self, rank: int) -> int:
        """Return the process id of a rank, once the observer knows all ranks and they train."""
        self.job.wait_for_step(5)
        self.wait_for(r"attempt 0: 2 ranks")
        return ranks_below(self.job.process.pid)[rank]

    def incidents(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return class and culprits of the incidents."""
        found = read_history(self.job.folder / LOG_FILE).incidents.values()
        return [(each.class_, each.culprit.ranks) for each in found if each.class_ != "alert"]


@pytest.mark.slow
def test_a_stopped_rank_and_a_killed_rank_of_torchrun_are_named(tmp_path: Path) -> None:
    with ObservedTorchrun(tmp_path) as observed:
        rank_1, rank_0 = observed.rank(1), observed.rank(0)
        os.kill(rank_1, signal.SIGSTOP)
        observed.wait_for(r"incident 1 \(hang\).* rank 1 on .* is stopped")
        os.kill(rank_1, signal.SIGCONT)
        observed.wait_for("the ranks make progress again")
        os.kill(rank_0, signal.SIGKILL)
        observed.wait_for(r"rank 0 on \S+ (was killed by SIGKILL|ended before .* only its launcher knows)")
        observed.job.end()
        observed.observer.send_signal(signal.SIGTERM)
        assert observed.observer.wait(SECONDS) == Exit.STOPPED
    assert observed.incidents() == [("hang", (1,)), ("process", (0,))]


@pytest.mark.slow
def test_an_error_of_a_rank_of_torchrun_is_told_in_its_words(tmp_path: Path) -> None:
    known = tmp_path / "known"
    when = f"os.path.exists({str(known)!r})"
    env = with_planted(tmp_path / "site", 1, "ValueError('planted in rank one')", when)
    with ObservedTorchrun(tmp_path, **env) as observed:
        observed.rank(1)
        known.touch()
        observed.wait_for(r"incident 1 \(software\).* rank 1 on \S+ failed: ValueError: planted in rank one")
        assert observed.job.end()[0] == Exit.UNCLASSIFIED
        assert observed.observer.wait(SECONDS) == Exit.UNCLASSIFIED
    assert observed.incidents() == [("software", (1,))]


@pytest.mark.slow
def test_a_job_that_torchrun_has_stopped_has_the_status_of_its_ranks(tmp_path: Path) -> None:
    with ObservedTorchrun(tmp_path) as observed:
        observed.rank(0)
        observed.job.signal(signal.SIGTERM)
        assert observed.job.end()[0]
        assert observed.observer.wait(SECONDS) == Exit.STOPPED
    assert "the job has ended with status 143, after step " in (tmp_path / "observe.log").read_text()
    assert observed.incidents() == []
    assert read_history(observed.job.folder / LOG_FILE).ended == Exit.STOPPED
