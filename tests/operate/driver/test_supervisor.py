"""The supervisor and the end of a job: what the driver says counts as what is in the log."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megascale.cli.main import main
from megascale.config.loading import load_config
from megascale.core.errors import Exit
from megascale.core.run_folder import read_token, write_token
from megascale.operate.channel.driver_server import DriverServer
from megascale.operate.channel.secret import SECRET_VARIABLE, new_secret
from megascale.operate.driver import drive_job, supervisor
from megascale.operate.driver.driver import Driver
from megascale.operate.driver.incidents import JobHistory, read_history
from megascale.operate.driver.job_state import JobPlan
from megascale.operate.driver.scheduler.adapters import Adapter
from megascale.operate.driver.scheduler.none import NoScheduler
from megascale.operate.driver.scheduler.port import AgentLaunch
from tests.operate.driver.launched import launch_config

EARLIER = [
    {"event": "launch", "time": 100.0, "run": "test", "nodes": 1, "world": 1, "scheduler": "local"},
    {"event": "driver", "time": 100.0},
    {"event": "ended", "time": 200.0, "status": 0, "step": 30},
]
"""The log of an earlier launch."""

BEGUN = [{**EARLIER[0], "time": 300.0}, {"event": "driver", "time": 300.0}]
"""Lines of this launch."""

ENDED = {"event": "ended", "time": 400.0, "status": 93, "step": 40}


def lines(*events: dict[str, Any]) -> str:
    return "".join(json.dumps(event) + "\n" for event in events)


class Drivers:
    """Drivers that are scripts: each adds lines to the log, says something to the supervisor, and dies or ends."""

    def __init__(self, log: Path, *scripts: tuple[str, str, int]) -> None:
        self.log = log
        self.scripts = list(scripts)
        self.roles: list[str] = []

    def start(self, arguments: Sequence[str], scheduler: int, secret: int) -> subprocess.Popen[bytes]:
        self.roles.append(arguments[-1])
        written, said, status = self.scripts.pop(0)
        script = f"import os; open({str(self.log)!r}, 'a').write({written!r}); "
        script += f"os.write({scheduler}, {said.encode()!r}); os._exit({status})"
        return subprocess.Popen([sys.executable, "-c", script], pass_fds=[scheduler])


def keep(drivers: Drivers, monkeypatch: pytest.MonkeyPatch) -> JobHistory:
    """Keep drivers alive to the end of the job."""
    monkeypatch.setattr(supervisor, "_start_driver", drivers.start)
    write_token(drivers.log.parent, "id")
    before, scheduler = read_history(drivers.log), NoScheduler()
    kept = supervisor._keep_driver(drivers.log, [], 0, scheduler, supervisor._Signals(), before)
    return asyncio.run(asyncio.wait_for(kept, 30))


def test_a_job_whose_end_is_not_in_the_log_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full at its end."""
    drivers = Drivers(tmp_path / "log", (lines(*BEGUN), '{"ended": 93}\n', 93))
    assert keep(drivers, monkeypatch).ended == Exit.DO_NOT_REQUEUE
    assert drivers.roles == ["--first"]


def test_the_end_of_an_earlier_launch_is_not_this_one_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first driver dies before it has written a line, the second one later."""
    log = tmp_path / "log"
    log.write_text(lines(*EARLIER))
    drivers = Drivers(log, ("", "", 1), (lines(*BEGUN), "", 1), (lines(ENDED), "", 93))
    assert keep(drivers, monkeypatch).ended == Exit.DO_NOT_REQUEUE
    assert drivers.roles == ["--first", "--first", "--takeover"]


def test_a_launch_whose_drivers_all_die_is_no_success_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text(lines(*EARLIER))
    assert keep(Drivers(log, *[("", "", 1)] * supervisor.CRASHES), monkeypatch).ended is None


def test_a_driver_that_dies_when_the_runs_folder_is_lost_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new driver would find no log, and begin the run anew."""
    drivers = Drivers(tmp_path / "run" / "log", ("", "", 1), ("", "", 1))
    drivers.log.parent.mkdir()
    start = drivers.start

    def lose_and_start(*arguments: Any) -> subprocess.Popen[bytes]:
        drivers.log.parent.rename(tmp_path / "away")
        return start(*arguments)

    monkeypatch.setattr(drivers, "start", lose_and_start)
    assert keep(drivers, monkeypatch).ended == Exit.DO_NOT_REQUEUE
    assert drivers.roles == ["--first"] and not drivers.log.parent.exists()


@pytest.mark.parametrize("heals", [True, False])
def test_the_end_is_told_and_its_lines_are_written_as_soon_as_the_log_can_be(
    heals: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run's folder is away when the job ends."""
    told: list[int] = []
    config = load_config(str(launch_config(tmp_path)))
    config.folder.mkdir(parents=True)

    async def end(driver: Driver) -> int:
        config.folder.rename(tmp_path / "away")
        driver.perform(driver._job.request_stop(time.time()))
        return await driver.status

    async def come_back() -> None:
        while not told:
            await asyncio.sleep(0.01)
        await asyncio.sleep(2 * drive_job.AGAIN_S)
        (tmp_path / "away").rename(config.folder)

    async def body() -> int:
        back = asyncio.ensure_future(come_back()) if heals else None
        plan = JobPlan("run", 1, 1, (), str(config.folder / "logs"), folder=str(config.folder))
        server, size = DriverServer(b"x" * 32), {"nodes": 1, "world": 1, "scheduler": "none"}
        status = await drive_job.drive_job(plan, config.fault, NoScheduler(), server, size, told.append)
        if back is not None:
            await back
        return status

    monkeypatch.setattr(Driver, "run", end)
    monkeypatch.setattr(drive_job, "REST_S", 10.0 if heals else 0.1)
    assert asyncio.run(asyncio.wait_for(body(), 30)) == Exit.STOPPED
    assert told == [Exit.STOPPED]
    if heals:
        assert read_history(config.folder / "incidents.jsonl").ended == Exit.STOPPED
    else:
        assert "the log of incidents is incomplete: 1 lacking, the run's folder is lost" in capfd.readouterr().err


def test_the_driver_tells_its_supervisor_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def end(*arguments: Any) -> int:
        arguments[5](93)
        return 93

    monkeypatch.setattr(drive_job, "drive_job", end)
    monkeypatch.setenv(SECRET_VARIABLE, new_secret())
    ours, theirs = socket.socketpair()
    with ours:
        config = launch_config(tmp_path)
        run_id, _ = read_token(load_config(str(config)).folder, {})
        options = ["--nodes", "1", "--scheduler", "local", "--listen", "127.0.0.1:0", "--first", "--run-id", run_id]
        options += ["--scheduler-descriptor", str(theirs.detach())]
        assert main(["driver", str(config), *options]) == 93
        said = ours.makefile().read().splitlines()
    assert '{"ended": 93}' in said


def test_agents_know_the_driver_by_name_and_it_listens_where_they_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is loopback on its own host, as on Debian."""
    told: list[str] = []

    def open_scheduler(count: int, agent: AgentLaunch) -> NoScheduler:
        told.append(agent.driver)
        return NoScheduler()

    async def keep_driver(log: Path, arguments: Sequence[str], *more: object) -> JobHistory:
        told.append(arguments[arguments.index("--listen") + 1])
        return JobHistory(ended=0)

    adapter = Adapter(lambda: ("node7", 0), open_scheduler, revivable=False, requestable=False)
    monkeypatch.setitem(supervisor.ADAPTERS, "other", adapter)
    monkeypatch.setattr(supervisor, "_keep_driver", keep_driver)
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port, type: [(type, 0, 0, "", ("127.0.1.1", port))])
    assert asyncio.run(supervisor.supervise(tmp_path, (), 1, "other")) == Exit.OK
    (name, port), (host, listened) = (address.rsplit(":", 1) for address in told)
    assert (name, host) == ("node7", "")
    assert port == listened
