"""The Slurm scheduler on a real cluster: slurmctld, and a slurmd for each of four nodes of this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megascale.operate.driver.scheduler.port import AgentLaunch, Node, SchedulerError
from megascale.operate.driver.scheduler.slurm import SlurmScheduler, allocation_nodes, this_node
from megascale.operate.node.ranks import DRIVER_LOST
from tests.marks import only_quick
from tests.operate.node.slurm import Slurm, missing

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "launch" / "slurm_fault.sbatch"
SECONDS = 60


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := missing():
        pytest.skip(reason)
    with Slurm(tmp_path_factory.mktemp("slurm") / "cluster", nodes=4, slurmd_timeout=10) as cluster:
        yield cluster


DRIVER = """
import asyncio, os, sys
from pathlib import Path
from megascale.operate.driver.scheduler.port import AgentLaunch, SchedulerError
from megascale.operate.driver.scheduler.slurm import SlurmScheduler, allocation_nodes, this_node

AGENT = '''
import os, time
secret = os.environ["MEGASCALE_JOB_SECRET"]
print(*map(os.environ.get, ("MEGASCALE_NODE", "SLURMD_NODENAME", "MEGASCALE_DRIVER")), len(secret), flush=True)
time.sleep(600)
'''

async def main():
    allocation = allocation_nodes()
    Path("logs").mkdir(exist_ok=True)
    agent = AgentLaunch(this_node(allocation).address + ":4000", "5" * 64, Path("logs"), [sys.executable, "-c", AGENT])
    scheduler = SlurmScheduler(3, agent, allocation)
    for node in await scheduler.nodes():
        await scheduler.start_agent(node.name)
    print("started", this_node(allocation).name, flush=True)
    lost = await told()
    await scheduler.exclude(lost, "no heartbeat", None)
    await scheduler.release(lost)
    (new,) = await scheduler.request(1)
    try:
        await scheduler.request(1)
    except SchedulerError as error:
        print(error, flush=True)
    await scheduler.start_agent(new.name)
    print("replaced", lost, new.name, flush=True)
    await told()
    await scheduler.stop(False, 10.0)
    print("stopped", flush=True)

async def told():
    while not (words := sorted(Path().glob("tell-*"))):
        await asyncio.sleep(0.05)
    words[0].unlink()
    return words[0].name.removeprefix("tell-")

asyncio.run(main())
"""


def wait_for(done: Callable[[], object], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


def test_a_dead_node_is_replaced_by_a_spare_node_of_the_allocation(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n{sys.executable} driver.py\n")
    successor = slurm.submit("--hold", "--nodes=3", "--wrap=true", folder=tmp_path)
    env = {"PYTHONPATH": str(ROOT), "MEGASCALE_SUCCESSOR": successor}
    job = slurm.submit("--no-kill", "--nodes=4", "--output=out", str(script), folder=tmp_path, env=env)

    def output() -> str:
        return (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""

    def agent(node: str) -> str:
        log = tmp_path / "logs" / f"agent-{node}.log"
        return log.read_text() if log.exists() else ""

    wait_for(lambda: all(" 64\n" in agent(node) for node in ("n0", "n1", "n2")), output)
    assert agent("n1").splitlines()[-1] == "n1 n1 127.0.0.1:4000 64" and not agent("n3")
    slurm.kill_node("n1")
    (tmp_path / "tell-n1").touch()
    wait_for(lambda: "n3 n3" in agent("n3"), output)
    assert "replaced n1 n3" in output() and "the allocation has no further node" in output()
    assert slurm.state(successor)["ExcNodeList"] == "n1"
    assert slurm.state(job)["JobState"] == "RUNNING"
    (tmp_path / "tell-stop").touch()
    wait_for(lambda: "stopped" in output(), output)
    assert slurm.end(successor)[0] == "CANCELLED"
    slurm.restart_node("n1")
    assert slurm.end(job) == ("COMPLETED", "0:0")
    assert not [pid for node in slurm.nodes for pid in slurm.processes(node)]


def test_outside_of_an_allocation(tmp_path: Path) -> None:
    with pytest.raises(SchedulerError, match="SLURM_JOB_NODELIST"):
        allocation_nodes({"SLURM_JOB_ID": "7"})
    nodes = [Node("n0", "n0"), Node("n1", "n1")]
    assert this_node(nodes, {"SLURMD_NODENAME": "n1"}).name == "n1" and this_node(nodes, {}).name == "n0"
    with pytest.raises(SchedulerError, match="3 nodes of an allocation of 2"):
        SlurmScheduler(3, AgentLaunch("n0:1", "5" * 64, tmp_path), nodes)


class Chain:
    """Jobs of launch/slurm_fault.sbatch; in place of python a program that ends with the next of `statuses`."""

    PROGRAM = """#!/bin/bash
number=$(ls attempt-* 2>/dev/null | wc -l)
echo "$SLURM_JOB_ID $SLURM_JOB_NUM_NODES $*" > attempt-$number
trap 'echo saved; exit 143' TERM
status=$(sed -n "$((number + 1))p" statuses)
if [ "$status" = wait ]; then sleep 1000 & wait; fi
exit "$status"
"""

    def __init__(self, slurm: Slurm, folder: Path, *statuses: object, options: tuple[str, ...] = ()) -> None:
        self.slurm, self.folder, self.name = slurm, folder, folder.name[:30]
        (folder / "runs").mkdir()
        (folder / "statuses").write_text("\n".join(map(str, statuses)))
        program = folder / "python"
        program.write_text(self.PROGRAM)
        program.chmod(0o755)
        words = ["--nodes=2", "--time=5", f"--job-name={self.name}", *options, str(SCRIPT), "a.toml", "--spares", "1"]
        self.first = slurm.submit(*words, folder=folder, env={"PYTHON": str(program)})

    def attempts(self) -> list[list[str]]:
        return [path.read_text().split() for path in sorted(self.folder.glob("attempt-*"))]

    def output(self) -> str:
        return "".join(path.read_text() for path in sorted((self.folder / "runs").glob("*.out")))

    def waiting(self) -> list[str]:
        return self.slurm.ask("squeue", "-h", "-n", self.name, "-o", "%A").split()

    def end(self) -> None:
        wait_for(lambda: not self.waiting(), self.output)


@pytest.mark.slow
def test_the_chain_ends_with_success(slurm: Slurm, tmp_path: Path) -> None:
    chain = Chain(slurm, tmp_path, 1, 143, 0)
    chain.end()
    attempts = chain.attempts()
    assert len({job for job, *_ in attempts}) == len(attempts) == 3
    rest = "2 -m megascale launch a.toml --spares 1 --scheduler slurm"
    assert [" ".join(words) for _, *words in attempts] == [rest] * 3, chain.output()
    assert "ended with status 143" in chain.output()


@pytest.mark.parametrize("status", only_quick([2, 93], 93))
def test_the_chain_ends_with_an_error_that_would_recur(slurm: Slurm, tmp_path: Path, status: int) -> None:
    chain = Chain(slurm, tmp_path, status, 0)
    chain.end()
    assert len(chain.attempts()) == 1
    assert f"ended with status {status}" in chain.output()


@pytest.mark.slow
def test_the_successor_takes_over_when_the_job_is_lost(slurm: Slurm, tmp_path: Path) -> None:
    chain = Chain(slurm, tmp_path, "wait", 0)
    wait_for(chain.attempts, chain.output)
    assert len(chain.waiting()) == 2
    slurm.ask("scancel", "--batch", "--signal=KILL", chain.first)
    chain.end()
    assert len(chain.attempts()) == 2


@pytest.mark.slow
def test_the_run_saves_before_the_time_limit_and_the_successor_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    chain = Chain(slurm, tmp_path, "wait", 0)
    wait_for(chain.attempts, chain.output)
    slurm.ask("scancel", "--batch", "--signal=TERM", chain.first)  # what --signal=B:TERM@120 sends
    chain.end()
    assert "saved" in chain.output() and "ended with status 143" in chain.output()
    assert len(chain.attempts()) == 2


@pytest.mark.slow
def test_a_chain_has_an_end(slurm: Slurm, tmp_path: Path) -> None:
    chain = Chain(slurm, tmp_path, *[1] * 5, options=("--export=ALL,MEGASCALE_CHAIN=1",))
    chain.end()
    assert len(chain.attempts()) == 2


@pytest.mark.parametrize(
    ("status", "held", "cancelled"),
    [(DRIVER_LOST, "", True), (1, "", False), (0, "", False), (DRIVER_LOST, "7", False)],
)
def test_an_agent_without_a_driver_cancels_a_job_without_its_first_node(
    tmp_path: Path, status: int, held: str, cancelled: bool
) -> None:
    programs = {"squeue": f'echo "$*" >> asked; printf "{held}"', "scancel": "echo $* > cancelled"}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    node = Node("n1", "n1")
    env = {"SLURMD_NODENAME": "n0", "SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    agent = AgentLaunch("n0:1", "5" * 64, tmp_path, ["sh", "-c", f"exit {status}"])
    command = SlurmScheduler(1, agent, [node], env).step_command()
    with subprocess.Popen(command, env=env, cwd=tmp_path, start_new_session=True) as step:
        if status == DRIVER_LOST:
            (tmp_path / "asked").touch()
            wait_for(lambda: "--jobs 7 --nodelist n0" in (tmp_path / "asked").read_text(), str)
        if held:
            os.killpg(step.pid, signal.SIGKILL)  # it would look again
        assert step.wait() == (-signal.SIGKILL if held else status)
    assert (tmp_path / "cancelled").exists() == cancelled
