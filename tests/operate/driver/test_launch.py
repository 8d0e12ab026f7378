"""`megascale launch`: a job that survives the loss of a rank, an agent and the driver, with the undisturbed losses."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.cli.main import main
from megascale.core.errors import Exit
from megascale.operate.driver.incidents import LOG_FILE
from tests.jobs import curve, finish, lives, standby_processes
from tests.operate.driver.launched import LaunchedJob, launch_config


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """The curve of the run without a fault."""
    return curve(finish(launch_config(tmp_path_factory.mktemp("undisturbed"))))


def unique(steps: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """The curve; a step that was computed twice must have the same loss twice."""
    return sorted(set(curve(steps)))


def test_impossible_launches_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(launch_config(tmp_path))
    assert main(["launch", config, "--nodes", "3"]) == Exit.CONFIG
    assert "4 ranks do not divide over 3 nodes  -> one of 1, 2, 4" in capsys.readouterr().err
    assert main(["launch", config, "--nodes", "2", "--scheduler", "cron"]) == Exit.CONFIG
    assert "no scheduler 'cron'" in capsys.readouterr().err
    assert main(["launch", config, "comm.timeout_s=8", "--nodes", "2"]) == Exit.CONFIG
    assert "comm.timeout_s: 8.0 s: ranks would give up before the verdict" in capsys.readouterr().err
    assert main(["launch", config, "--nodes", "2", "--topology", str(tmp_path / "absent")]) == Exit.CONFIG
    assert f"{tmp_path / 'absent'}  cannot be read: No such file or directory" in capsys.readouterr().err
    assert (
        main(["launch", config, "parallel.dp=2", "parallel.pp=2", "parallel.far_axis=dp", "--nodes", "2"])
        == Exit.CONFIG
    )
    assert "parallel.far_axis: dp has no effect without a topology  -> --topology FILE" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_fill_nodes_in_the_order_of_the_topology(tmp_path: Path, undisturbed: Any) -> None:
    (tmp_path / "topology.conf").write_text("SwitchName=a Nodes=node[0,2]\nSwitchName=b Nodes=node[1,3]\n")
    config = launch_config(tmp_path)
    job = LaunchedJob(config, "--nodes", "4", "--topology", str(tmp_path / "topology.conf"))
    status, output, _ = job.end()
    assert status == 0, output
    assert "4 ranks on node0, node2, node1, node3" in output
    assert unique(job.steps()) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_killed_rank_is_restarted_from_copies_in_memory(resume: str, tmp_path: Path, undisturbed: Any) -> None:
    job = LaunchedJob(launch_config(tmp_path, checkpoint__resume=resume), "--nodes", "2")
    job.wait_for_step(5)
    os.kill(job.pid("rank", rank=3), signal.SIGKILL)
    everything = [job.process.pid, *(process.pid for process in job.processes())]
    status, output, _ = job.end()
    assert status == 0, output
    assert unique(job.steps()) == undisturbed
    incident = job.history.incidents[1]
    assert (incident.class_, incident.culprit.ranks, incident.action.kind) == ("process", (3,), "restart")
    assert incident.verdict_s < 10
    assert incident.steps_lost is not None
    assert incident.steps_lost <= 1
    assert "rank 3 on node1 was killed by SIGKILL" in output
    assert "resumed from the copies in memory" in output, "rank 0's output of both attempts is shown"
    assert not [pid for pid in everything if lives(pid)]


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_a_lost_agent_is_replaced_by_the_spare(tmp_path: Path, undisturbed: Any) -> None:
    job = LaunchedJob(launch_config(tmp_path, train__steps=40), "--nodes", "2", "--spares", "1")
    job.wait_for_step(5)
    os.kill(job.pid("rank", rank=2), signal.SIGSTOP)
    job.wait_for_recovery()
    ranks = [process.pid for process in job.processes() if process.kind == "rank" and process.node == "node0"]
    spare = job.pid("agent", node="node2")
    job.wait_until(lambda: len(standby_processes(spare)) == 2, "the spare's processes in standby")
    waiting = standby_processes(spare)
    os.kill(job.pid("agent", node="node0"), signal.SIGKILL)
    job.wait_for_recovery(2)
    assert all(map(lives, waiting)), "they run the ranks"
    status, output, _ = job.end()
    assert status == 0, output
    hang, lost = job.history.incidents.values()
    assert (hang.class_, hang.culprit.ranks) == ("hang", (2,))
    assert (lost.class_, lost.culprit.nodes, lost.action.kind) == ("node", ("node0",), "replace")
    assert job.history.nodes == ("node2", "node1")
    assert not [pid for pid in ranks if lives(pid)]
    assert len(unique(job.steps())) == 40


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_training_goes_on_without_a_driver_and_the_next_one_takes_over(
    number: int, tmp_path: Path, undisturbed: Any
) -> None:
    steps = 30 if number == signal.SIGKILL else 2000  # a driver that does not answer is killed after 30 s
    job = LaunchedJob(launch_config(tmp_path, train__steps=steps), "--nodes", "2")
    job.wait_for_step(3)
    ranks, driver = job.ranks(), job.pid("driver")
    os.kill(driver, number)
    job.wait_until(lambda: job.history.drivers == 2, "a second driver")
    assert job.ranks() == ranks
    assert job.pid("driver") != driver
    os.kill(ranks[1], signal.SIGKILL)
    if number == signal.SIGSTOP:
        job.wait_for_recovery()
        job.signal(signal.SIGTERM)
    status, output, _ = job.end()
    assert status == (0 if number == signal.SIGKILL else Exit.STOPPED), output
    assert number == signal.SIGSTOP or unique(job.steps()) == undisturbed
    assert job.history.incidents[1].culprit.ranks == (1,)


@pytest.mark.slow
def test_a_driver_that_dies_before_it_has_started_agents(tmp_path: Path, undisturbed: Any) -> None:
    """The next one starts those that do not run."""
    job = LaunchedJob(launch_config(tmp_path), "--nodes", "2")
    log = job.folder / LOG_FILE
    job.wait_until(lambda: log.exists() and '"driver"' in log.read_text(), "the first driver's events")
    os.kill(job.pid("driver"), signal.SIGKILL)
    status, output, _ = job.end()
    assert status == 0, output
    assert job.history.drivers == 2
    assert unique(job.steps()) == undisturbed


@pytest.mark.slow
def test_a_stop_saves_and_the_next_launch_goes_on(tmp_path: Path, undisturbed: Any) -> None:
    config = launch_config(tmp_path)
    job = LaunchedJob(config, "--nodes", "2")
    job.wait_for_step(5)
    job.signal(signal.SIGTERM)
    status, output, _ = job.end()
    assert status == Exit.STOPPED, output
    assert (job.folder / "checkpoints").exists()
    again = LaunchedJob(config, "--nodes", "4")
    status, output, _ = again.end()
    assert status == 0, output
    assert unique(again.steps()) == undisturbed
    assert again.history.attempt == 1


@pytest.mark.slow
def test_a_request_to_stop_that_all_processes_get_saves(tmp_path: Path) -> None:
    """Supervisor, driver, agents and ranks have a delivery each, and ranks hear of it once more by an order."""
    job = LaunchedJob(launch_config(tmp_path, train__steps=100_000), "--nodes", "2")
    job.wait_for_step(2)
    job.signal_all(signal.SIGTERM)
    status, output, _ = job.end()
    assert status == Exit.STOPPED, output
    step = job.steps()[-1]["step"]
    assert output.endswith(f"stopped by a signal after step {step}, which is saved\n")
    assert f"step-{step:08d}" in [folder.name for folder in (job.folder / "checkpoints").iterdir()]
    assert not job.history.incidents


@pytest.mark.slow
def test_sigterm_to_one_rank_is_an_incident_of_this_rank(tmp_path: Path) -> None:
    job = LaunchedJob(launch_config(tmp_path, train__steps=100_000), "--nodes", "2")
    job.wait_for_step(5)
    os.kill(job.pid("rank", rank=2), signal.SIGTERM)
    job.wait_for_recovery()
    job.signal(signal.SIGTERM)
    status, output, _ = job.end()
    assert status == Exit.STOPPED, output
    (incident,) = (one for one in job.history.incidents.values() if one.class_ != "alert")
    assert (incident.class_, incident.culprit.ranks, incident.action.kind) == ("process", (2,), "restart")
    assert "rank 2 on node1 was killed by SIGTERM" in output
    assert "received SIGTERM, which nobody of this job sent: this rank ends" in output


@pytest.mark.slow
def test_all_processes_die_with_the_supervisor(tmp_path: Path) -> None:
    job = LaunchedJob(launch_config(tmp_path, train__steps=1000), "--nodes", "2")
    job.wait_for_step(2)
    everything = [process.pid for process in job.processes()]
    assert len(everything) == 1 + 2 + 4
    job.kill()
    deadline = time.monotonic() + 20
    while any(map(lives, everything)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in everything if lives(pid)]


@pytest.mark.slow
def test_a_step_that_always_fails_stops_with_93(tmp_path: Path) -> None:
    job = LaunchedJob(launch_config(tmp_path, checkpoint__in_memory_every=0), "--nodes", "1")
    for failures in (1, 2, 3):
        job.wait_until(lambda n=failures: job.history.attempt == n - 1 and 2 in job.ranks(), "a new attempt")
        os.kill(job.ranks()[2], signal.SIGKILL)
    status, output, _ = job.end()
    assert status == Exit.DO_NOT_REQUEUE, output
    assert "step 1 has failed in this way 3 times" in output
