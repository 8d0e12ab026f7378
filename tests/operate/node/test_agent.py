"""The agent of a node, against a scripted driver: real processes on loopback."""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import megascale
from megascale.config.fault import FaultConfig
from megascale.core.errors import Exit
from megascale.core.network import LOOPBACK, listen, reserve_port
from megascale.core.process import ORDER_WAIT_S
from megascale.core.run_folder import write_token
from megascale.operate.channel.agent_channel import AgentChannel
from megascale.operate.channel.driver_server import DriverServer
from megascale.operate.channel.ends import Disconnected
from megascale.operate.channel.messages import (
    Check,
    CheckDone,
    Collect,
    Heartbeat,
    Hello,
    Leave,
    OpenStore,
    Prepare,
    RanksEnded,
    Records,
    Stacks,
    Start,
    Stop,
    StoreOpened,
    Welcome,
)
from megascale.operate.channel.secret import new_secret
from megascale.operate.driver.classify import classify_ends
from megascale.operate.node import agent, store_listener
from megascale.operate.node.agent import Agent
from megascale.operate.node.agent_ranks import AgentRanks
from megascale.operate.node.ranks import DRIVER_LOST, NodePlace
from megascale.operate.node.stored_copies import stored_copies
from megascale.record.rank_state import RankState, RankStatus
from tests.core.test_run_folder import known
from tests.jobs import lives, standby_processes
from tests.operate.health.nodes import Node, driver, flight_records, gone, key_of, node, rank_environment, run, within


def agent_at(place: NodePlace, secret: bytes) -> Agent:
    """An agent in this process that starts no ranks, which would need the secret's descriptor."""
    return Agent(place, functools.partial(AgentChannel, place.driver, secret), -1)


def test_ranks_are_started_watched_and_a_killed_one_is_reported_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as (ours, agent):
            pids = await ours.start(tmp_path)
            killed = time.time()
            os.kill(pids[1], signal.SIGKILL)
            end = (await ours.end_of(1))[1]
            assert (end.status, end.error, end.in_order, end.stopped) == (-signal.SIGKILL, None, False, False)
            assert end.last_lines == ("rank 1 prints",)
            assert 0 <= end.time - killed < 10
            beat = await ours.until(Heartbeat, lambda beat: len(beat.ranks) == 1)
            status = beat.ranks[0]
            assert (status.rank, status.pid, status.phase, beat.attempt) == (0, pids[0], "step", 1)
            assert status.progress > 0
            assert status.rss > 1 << 20
            assert status.first_step > 0
            environment = ast.literal_eval((tmp_path / "environment-0").read_text())
            expected = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            expected |= {"MEGASCALE_NODE": "n0", "MEGASCALE_ATTEMPT": "1", "GREETING": "hi"}
            assert {name: environment.get(name) for name in expected} == expected
            agent.tell(0, "end")
            assert (await ours.end_of(0))[0].in_order
            assert len(flight_records()) == 2, "they outlive the ranks"
            ours.send(Leave("the job has ended"))
            assert await agent.ended() == Exit.OK
            assert not flight_records()

    run(test)


def test_a_stopped_rank_shows_and_no_rank_outlives_its_stop(tmp_path: Path) -> None:
    """Rank 1 is stopped, and rank 2 heeds no order."""

    async def test() -> None:
        async with node(tmp_path) as (ours, agent):
            agent.tell(2, "deaf")
            pids = await ours.start(tmp_path, (0, 1, 2))
            os.kill(pids[1], signal.SIGSTOP)
            idle = lambda status: status.rank == 1 and min(status.idle_s, status.silent_s) > 1  # noqa: E731
            beat = await ours.until(Heartbeat, lambda beat: any(map(idle, beat.ranks)))
            states = {status.rank: status.state for status in beat.ranks}
            assert states[1] == "T"
            assert states[0] in "SR"
            ours.send(Collect(1, stacks=True, ranks=(1,)))
            records = await ours.until(Records)
            assert records.states == {1: "T"}
            record = RankState.from_dict(records.records[1])
            assert (record.rank, record.pid, record.phase) == (1, pids[1], "step")
            stacks = await ours.until(Stacks)
            assert "sitecustomize" in stacks.stacks[1], stacks
            ours.send(Collect(1, ranks=(1,), events=0))
            assert RankState.from_dict((await ours.until(Records)).records[1]).last == ()
            ours.send(Collect(7))
            assert await ours.until(Records) == Records(7, {}, {})
            ours.send(Stop(1, 0.5))
            start = time.monotonic()
            ended = await ours.until(RanksEnded, lambda message: len(message.ends) == 3)
            assert time.monotonic() - start < 10
            assert {end.rank: (end.status, end.stopped) for end in ended.ends} == {
                0: (143, True),
                1: (-signal.SIGKILL, True),
                2: (-signal.SIGKILL, True),
            }
            assert not any(map(lives, pids.values()))

    run(test)


@pytest.mark.parametrize("made", [True, False])
def test_copies_in_memory_are_in_use_as_long_as_the_agent_lives(made: bool, tmp_path: Path) -> None:
    """Also between attempts, and if the run's folder is lost: the next attempt resumes from them. Without copies
    nothing stays.
    """
    memory, place = tmp_path / "memory", tmp_path / "run"
    place.mkdir()
    write_token(place, "id", "first")
    folder = known(place)

    def in_use() -> list[bool]:
        return [one.in_use for one in stored_copies(memory)]

    async def test() -> None:
        async with node(tmp_path) as (ours, agent):
            await ours.start(tmp_path, run=folder)
            if made:
                (folder.copies("n0") / "rank-00000.a").write_bytes(b"a copy")
            agent.tell(0, "end")
            agent.tell(1, "end")
            await ours.end_of(0, 1)
            place.rename(tmp_path / "lost")
            assert in_use() == [True]
            ours.send(Leave("the job has ended"))
            assert await agent.ended() == Exit.OK

    run(test)
    assert in_use() == [False] * made
    assert made or not any(memory.iterdir())


async def in_standby(agent: Node) -> int:
    """Wait for the one process in standby of an agent."""
    while not (found := standby_processes(agent.process.pid)):
        await asyncio.sleep(0.05)
    (pid,) = found
    return pid


@pytest.mark.slow
def test_a_rank_starts_in_a_process_in_standby_and_without_one_in_a_new_process(tmp_path: Path) -> None:
    """A new process prints as it starts; one in standby has started before it is a rank."""

    async def test() -> None:
        async with node(tmp_path) as (ours, agent):
            ours.send(Prepare(1))
            ours.send(Prepare(1))
            pid = await in_standby(agent)
            ours.send(OpenStore(1))
            store = (await ours.until(StoreOpened)).address
            ours.send(Start(1, "run", 1, (0,), store, ("--version",), str(tmp_path / "logs"), {}))
            end = (await ours.end_of(0, attempt=1))[0]
            assert (end.status, end.last_lines) == (0, (f"megascale {megascale.__version__}",))
            assert not lives(pid)
            ours.send(Prepare(1))
            pid = await in_standby(agent)
            os.kill(pid, signal.SIGKILL)
            await gone([pid])  # a process that is still ending takes an order, and dies with it
            await ours.start(tmp_path, (0,), attempt=2)
            ours.send(Prepare(1))
            pid = await in_standby(agent)
            await ours.start(tmp_path, (0, 1), attempt=3)
            assert not lives(pid), "it was in standby for the one rank of a node, which has two now"
            ours.send(Prepare(2))
            while len(waiting := standby_processes(agent.process.pid)) < 2:
                await asyncio.sleep(0.05)
            ours.send(Leave("the job has ended"))
            assert await agent.ended() == Exit.OK
            assert not any(map(lives, waiting))

    run(test)


def test_ranks_die_with_their_agent(tmp_path: Path) -> None:
    """A killed agent leaves flight records; the next agent of the node removes them."""

    async def test() -> None:
        async with node(tmp_path) as (ours, agent):
            pids = await ours.start(tmp_path)
            agent.kill()
            assert await gone(list(pids.values())) < 1
            await ours.until(Disconnected)
            left = flight_records()
            assert len(left) == 2
            second = Node(tmp_path, ours.server.address, agent.secret)
            try:
                assert (await ours.until(Hello)).attempt is None
                await ours.start(tmp_path, attempt=2)
                assert not set(left) & set(flight_records())
                ours.send(Leave("done"))
                await second.ended()
                assert not flight_records()
            finally:
                second.kill()

    run(test)


def test_ranks_outlive_a_driver_and_the_next_one_takes_over(tmp_path: Path) -> None:
    """What happened meanwhile is said again; without a third driver the ranks save and leave."""
    secret = new_secret()

    async def test() -> None:
        with reserve_port() as reserved:
            port = reserved.getsockname()[1]
            async with driver(secret, port) as first:
                agent = Node(tmp_path, first.server.address, secret)
                await first.until(Hello)
                pids = await first.start(tmp_path, (0, 1, 2))
            try:
                os.kill(pids[2], signal.SIGKILL)
                await gone([pids[2]])
                async with driver(secret, port) as second:
                    hello = await second.until(Hello)
                    assert (hello.attempt, hello.ranks) == (1, (0, 1))
                    killed = (await second.end_of(2))[2]
                    assert (killed.status, killed.step > 0) == (-signal.SIGKILL, True)
                    before = await second.until(Heartbeat, lambda beat: len(beat.ranks) == 2)
                    pairs = lambda beat: zip(beat.ranks, before.ranks, strict=True)  # noqa: E731
                    after = await second.until(Heartbeat, lambda beat: all(a.step > b.step for a, b in pairs(beat)))
                    assert [status.pid for status in after.ranks] == [pids[0], pids[1]]
                    second.send(Welcome(0.1, 0.05, 0.5, 5.0))
                    await second.until(Heartbeat)
                assert await agent.ended() == DRIVER_LOST
                assert "no driver at" in agent.log.read_text()
                ends = {rank: (tmp_path / f"logs/attempt-1/rank-{rank}.error.json").read_text() for rank in (0, 1)}
                assert all('"exit_status": 143' in end for end in ends.values())
            finally:
                agent.kill()

    run(test)


def test_an_agent_that_connects_says_the_present_steps_of_its_ranks() -> None:
    """A new driver knows no step but the log's, and may have to decide before the next heartbeat."""
    status = RankStatus(0, 1, step=37)
    ranks = AgentRanks(NodePlace("n0", LOOPBACK, "", 1), -1, None, print, print, print)  # type: ignore[arg-type]
    ranks.present = SimpleNamespace(attempt=2, running=(0,), ends={}, statuses=lambda: (status,))  # type: ignore[assignment]
    hello, beat = ranks.greeting()
    assert isinstance(hello, Hello) and isinstance(beat, Heartbeat)
    assert (hello.attempt, beat.attempt, beat.ranks) == (2, 2, (status,))


def test_the_last_words_of_a_rank_are_reported(tmp_path: Path) -> None:
    """An error of its own, a lost peer, and a line of its output that a pattern knows."""

    async def test() -> None:
        async with node(tmp_path) as (ours, agent):
            await ours.start(tmp_path, (0, 1, 2))
            for rank, what in enumerate(("raise", "lose", "full")):
                agent.tell(rank, what)
            ends = await ours.end_of(0, 1, 2)
            said = {rank: (end.status, end.error_kind, end.peer_lost, end.peers) for rank, end in ends.items()}
            assert said[0] == (1, "ValueError", False, ())
            assert said[1] == (1, "LostPeerError", True, (1,))
            assert said[2] == (4, "", False, ())
            assert ends[0].error == "ValueError: a bad value"
            assert ends[0].patterns == ("python:ValueError",)
            assert ends[2].patterns == ("disk_full", "python:OSError")

    run(test)


def test_an_agent_outlives_the_file_system_of_its_run(tmp_path: Path) -> None:
    """The file in which a rank said how it ended cannot be read."""

    async def test() -> None:
        async with node(tmp_path) as (ours, agent):
            await ours.start(tmp_path)
            agent.tell(1, "unreadable")
            ends = await ours.end_of(1)
            assert (ends[1].status, ends[1].error) == (1, None)
            printed, why = ends[1].last_lines
            assert printed == "rank 1 prints"
            assert why.startswith("how rank 1 ended cannot be read: [Errno 21] Is a directory")
            finding = classify_ends(ends, {0: "n0", 1: "n0"})
            assert (finding.class_, finding.culprit.ranks) == ("storage", (1,))
            agent.tell(0, "end")
            assert (await ours.end_of(0))[0].in_order

    run(test)


def test_a_node_whose_name_is_not_found_for_a_moment_opens_the_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = [socket.gaierror(-3, "Temporary failure in name resolution"), TimeoutError()]

    def listen_as(name: str) -> socket.socket:
        if failures:
            raise failures.pop(0)
        return listen(LOOPBACK)

    monkeypatch.setattr(store_listener, "listen_as", listen_as)
    monkeypatch.setattr(store_listener, "AGAIN_S", 0.01)

    async def test() -> None:
        secret = new_secret()
        async with driver(secret) as ours:
            place = NodePlace("n0", "node7", ours.server.address, 1)
            agent = asyncio.ensure_future(agent_at(place, key_of(secret)).run())
            await ours.until(Hello)
            ours.send(OpenStore(3))
            assert (await ours.until(StoreOpened)).attempt == 3
            ours.send(Leave("done"))
            assert await within(agent) == Exit.OK

    run(test)
    said = capsys.readouterr().err
    assert "the job's store cannot be opened at node7: [Errno -3] Temporary failure in name resolution" in said
    assert "the job's store cannot be opened at node7: no answer within 5 s" in said


def test_an_agent_goes_on_when_its_log_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        agent._say("waiting")
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.close()


def test_a_new_attempt_ends_the_earlier_one(tmp_path: Path) -> None:
    """An order that arrives again, or late, starts nothing; a rank that cannot be started has ended with the reason."""

    async def test() -> None:
        async with node(tmp_path) as (ours, _):
            first = await ours.start(tmp_path)
            second = await ours.start(tmp_path, attempt=2)
            assert not set(first.values()) & set(second.values())
            assert not any(map(lives, first.values()))
            order = ("run", 2, (0, 1), f"{LOOPBACK}:1", ("--version",))
            for attempt in (1, 2):
                ours.send(Start(attempt, *order, str(tmp_path / "logs"), {}))
            beat = await ours.until(Heartbeat)
            beat = await ours.until(Heartbeat)
            assert {status.rank: status.pid for status in beat.ranks} == second
            ours.send(Stop(1, 0.0))
            assert (await ours.until(RanksEnded, lambda message: message.attempt == 1)).ends == ()
            (tmp_path / "file").touch()
            ours.send(Start(3, *order, str(tmp_path / "file"), {}))
            ends = await ours.end_of(0, 1, attempt=3)
            assert "the folder of logs cannot be used" in str(ends[0].error)
            assert classify_ends(ends, {0: "n0", 1: "n0"}).class_ == "storage"
            assert not any(map(lives, second.values()))

    run(test)


def test_a_signal_to_the_agent_alone_ends_its_node(tmp_path: Path) -> None:
    """Its ranks do not save, which would stop the job: the driver, which orders nothing, replaces the node."""

    async def test() -> None:
        async with node(tmp_path) as (ours, agent):
            beat = await ours.until(Heartbeat, lambda beat: beat.host)
            assert beat.host is not None
            assert {"cpu.percent", "memory.available", "disk.shm.free", "clock.offset_s"} <= beat.host.keys()
            ours.send(Check(5, "limits", {}))
            done = await ours.until(CheckDone)
            assert (done.id, done.name, done.error) == (5, "limits", "")
            assert done.result["name"] == "limits"
            ours.send(Check(6, "weather", {}))
            assert "weather" in (await ours.until(CheckDone)).error
            pids = await ours.start(tmp_path)
            agent.process.send_signal(signal.SIGTERM)
            ends = await ours.end_of(0, 1)
            assert all((end.status, end.in_order, end.stopped) == (-9, False, True) for end in ends.values())
            assert await agent.ended() == Exit.STOPPED
            assert not any(map(lives, pids.values()))
            assert not flight_records()

    run(test)


def test_ranks_save_at_a_signal_that_all_processes_get(tmp_path: Path) -> None:
    """The driver's order holds, and the agent stays until it may leave, however long the ranks take to save."""

    async def test() -> None:
        async with node(tmp_path) as (ours, agent):
            await ours.start(tmp_path)
            agent.tell(0, "deaf")
            agent.process.send_signal(signal.SIGTERM)
            ours.send(Stop(1, 300.0, save=True))
            ours.send(Stop(1, 300.0, save=True))
            assert (await ours.end_of(1))[1].in_order
            await asyncio.sleep(ORDER_WAIT_S + 1)
            agent.tell(0, "hear")
            assert (await ours.end_of(0))[0].in_order
            ours.send(Leave("the job has ended"))
            assert await agent.ended() == Exit.OK

    run(test)


@pytest.mark.parametrize("deaf", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_signal_to_an_agent_without_a_driver_lets_the_ranks_save(deaf: bool, tmp_path: Path) -> None:
    """Until a second request, which kills them."""

    async def test() -> None:
        secret = new_secret()
        async with driver(secret) as ours:
            agent = Node(tmp_path, ours.server.address, secret)
            await ours.until(Hello)
            ours.send(Welcome(1.0, 0.25, 300.0, 300.0))
            pids = await ours.start(tmp_path)
            if deaf:
                agent.tell(0, "deaf")
        try:
            agent.process.send_signal(signal.SIGTERM)
            await gone([pids[1]], 60.0)
            while deaf and lives(pids[0]):
                agent.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.1)
            assert await agent.ended() == Exit.STOPPED
        finally:
            agent.kill()
        written = json.loads((tmp_path / "logs" / "attempt-1" / "rank-1.error.json").read_text())
        assert written["exit_status"] == 143 and not written["what"]

    run(test)


def test_the_secret_shows_nowhere_and_another_one_is_refused(tmp_path: Path) -> None:
    secret = new_secret()

    async def test() -> None:
        async with driver(secret) as ours:
            stranger = Node(tmp_path, ours.server.address, new_secret(), "n1")
            agent = Node(tmp_path, ours.server.address, secret)
            try:
                await ours.until(Hello)
                pids = await ours.start(tmp_path)
                for pid in (agent.process.pid, *pids.values()):
                    for name in ("cmdline", "environ"):
                        assert secret.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
                assert await stranger.ended() == Exit.UNCLASSIFIED
                assert "it has another secret than this process" in stranger.log.read_text()
                assert ours.server.refused == 1
                ours.send(Leave("done"))
                await agent.ended()
            finally:
                agent.kill()
                stranger.kill()

    run(test)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not [path for path in written if secret in path.read_text(errors="replace")]


def test_an_agent_without_a_node_or_secret_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megascale", "agent"],
        env={name: value for name, value in os.environ.items() if not name.startswith("MEGASCALE")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == Exit.CONFIG
    for name in ("MEGASCALE_NODE:", "MEGASCALE_NODE_ADDRESS:", "MEGASCALE_DRIVER:"):
        assert f"{name} not set" in done.stderr


def test_an_agent_says_once_that_it_waits_for_the_driver(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "WAIT_NOTICE_S", 0.1)
    with reserve_port(LOOPBACK) as silent:
        address = f"{LOOPBACK}:{silent.getsockname()[1]}"
        waiting = agent_at(NodePlace("n0", LOOPBACK, address, 1), new_secret().encode())
        waiting._settings = FaultConfig(poll_s=0.02, agent_grace_s=0.5)
        assert asyncio.run(waiting.run()) == DRIVER_LOST
    said = [line for line in capsys.readouterr().err.splitlines() if address in line]
    assert said[0] == f"megascale agent: waiting for the driver at {address}"
    assert len(said) == 2 and said[1].startswith(f"megascale agent: no driver at {address} for ")


def test_an_observer_of_another_run_than_the_driver_s_ends_with_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        secret = new_secret().encode()
        async with DriverServer(secret, run="two") as server:
            place = NodePlace("n0", LOOPBACK, server.address, 1, run="one")
            assert await within(agent_at(place, secret).run()) == Exit.CONFIG

    run(test)
    assert "told to leave: this driver watches run two, not one" in capsys.readouterr().err


def test_an_observer_watches_ranks_of_another_launcher(tmp_path: Path) -> None:
    """It reports states and ends, and starts and ends nothing."""

    async def test() -> None:
        name = f"observed-{os.getpid()}"
        ranks = []
        async with node(tmp_path, arguments=f"--observe {tmp_path / name}") as (ours, agent):
            try:
                for rank in range(2):
                    env = rank_environment(tmp_path, name, rank, logs=tmp_path / name / "logs")
                    ranks.append(subprocess.Popen([sys.executable, "-c", ""], env=env, stdout=subprocess.DEVNULL))
                assert await ours.training() == {rank: process.pid for rank, process in enumerate(ranks)}
                ours.send(OpenStore(1))
                ours.send(Stop(0, 0.0))
                assert (await ours.until(RanksEnded)).ends == ()
                ranks[1].send_signal(signal.SIGSTOP)
                beat = await ours.until(Heartbeat, lambda beat: any(status.state == "T" for status in beat.ranks))
                assert {status.rank for status in beat.ranks if status.state == "T"} == {1}
                ranks[1].send_signal(signal.SIGKILL)
                end = (await ours.end_of(1))[1]
                assert (end.in_order, end.status) == (False, -signal.SIGKILL), "its parent has not waited for it"
                agent.tell(0, "raise")
                end = (await ours.end_of(0))[0]
                assert (end.status, end.error_kind) == (1, "ValueError")
                assert "an observer takes no OpenStore" in agent.log.read_text()
                ours.send(Leave("done"))
                assert await agent.ended() == Exit.OK
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()
        assert not flight_records(name)

    run(test)


def test_an_agent_that_waits_for_the_runs_folder_heeds_orders(tmp_path: Path) -> None:
    away = tmp_path / "away"

    async def test() -> None:
        async with node(tmp_path) as (ours, _):
            ours.send(OpenStore(1))
            store = (await ours.until(StoreOpened)).address
            logs, folder = str(away / "logs"), known(away, wait_s=1000.0)
            ours.send(Start(1, "run", 1, (0,), store, ("--version",), logs, {}, folder))
            ours.send(Collect(1))
            await ours.until(Records)
            ours.send(Stop(1, 0.0))
            assert (await ours.until(RanksEnded)).ends == ()
            assert (await ours.start(tmp_path, (0,), attempt=2)).keys() == {0}
            assert not away.exists()

    run(test)
