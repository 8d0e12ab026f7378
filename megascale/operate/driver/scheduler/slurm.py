"""The Slurm scheduler: nodes of an allocation, spare nodes included; every agent is a job step of its own.

No privilege is needed: an evicted node stays in the allocation and gets no step. The allocation must survive a lost
node (`--no-kill`), and the loss of everything is a matter of the next job in the queue (launch/slurm_fault.sbatch).
Slurm's JSON differs by version, so only plain text is parsed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megascale.operate.channel.secret import SECRET_VARIABLE
from megascale.operate.driver.scheduler.port import AgentEnd, AgentLaunch, Node, SchedulerError
from megascale.operate.driver.scheduler.processes import HeldNodes, run
from megascale.operate.node.ranks import DRIVER_LOST

SUCCESSOR_VARIABLE = "MEGASCALE_SUCCESSOR"
"""Environment variable: the id of the job that takes over when this one ends without success."""

DRAIN_VARIABLE = "MEGASCALE_SLURM_DRAIN"
"""Environment variable: 1 to drain evicted nodes, which needs an operator's rights. Draining kills nothing."""

RELEASE_GRACE_S = 5.0
"""Seconds that Slurm has to kill a step; then only its client is killed, because the node does not answer."""

LOOK_S = 15  # seconds between looks of an agent without a driver at the nodes of the job

STOP_GRACE_S = 35.0
"""Seconds that Slurm has to kill the steps at the end of the job: longer than Slurm's KillWait, 30 s by default."""

_SLURM_LINES = ("srun: ", "slurmstepd: ", "slurmstepd-")

# One step on one node: a failure of another node or step does not end it, it shares what the job has there, and the
# ranks bind themselves to cores.
_STEP = (
    "--no-kill", "--kill-on-bad-exit=0", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--mem=0",
    "--cpu-bind=none", "--mpi=none",
)  # fmt: skip


def allocation_nodes(env: Mapping[str, str] = os.environ) -> list[Node]:
    """Return the nodes of this job's allocation. The first is the node of the batch script.

    Raises: SchedulerError outside of an allocation, or without an answer of Slurm
    """
    if "SLURM_JOB_NODELIST" not in env:
        hint = "sbatch launch/slurm_fault.sbatch CONFIG, or salloc first"
        raise SchedulerError("this is no allocation of Slurm: SLURM_JOB_NODELIST is not set", hint=hint)
    names = _ask("scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]).split()
    facts = _ask("scontrol", "--oneliner", "show", "node", env["SLURM_JOB_NODELIST"])
    addresses = dict(re.findall(r"^NodeName=(\S+) .*?\bNodeAddr=(\S+)", facts, re.MULTILINE))
    return [Node(name, addresses.get(name, name)) for name in names]


def this_node(nodes: Sequence[Node], env: Mapping[str, str] = os.environ) -> Node:
    """Return the node on which this process runs, the first in the shell of salloc."""
    return next((node for node in nodes if node.name == env.get("SLURMD_NODENAME")), nodes[0])


def _ask(*command: str) -> str:
    """Return the output of a command of Slurm. Raises: SchedulerError"""
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SchedulerError(f"{command[0]}: {error.strerror}", hint="install Slurm's commands on this node") from None
    if result.returncode:
        raise SchedulerError(f"{' '.join(command)}: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


# With --no-kill an allocation outlives the node of its batch script, where driver and supervisor run, until the time
# limit. Agents that have lost the driver for good cancel the job as soon as Slurm has removed that node from it, and
# the successor starts. $0 is the node.
_STEP_SCRIPT = f"""
trap stop=1 TERM
"$@"
status=$?
while [ "$status" = {DRIVER_LOST} ] && [ -z "$stop" ]; do
    if held=$(squeue --noheader --jobs "$SLURM_JOB_ID" --nodelist "$0" --format %A) && [ -z "$held" ]; then
        echo "megascale: the node of the driver, $0, is lost: job $SLURM_JOB_ID is cancelled" >&2
        scancel "$SLURM_JOB_ID"
        break
    fi
    sleep {LOOK_S}
done
exit "$status"
"""


class SlurmScheduler(HeldNodes):
    """`Scheduler` in an allocation: its first `count` nodes, and further nodes on request."""

    def __init__(
        self, count: int, agent: AgentLaunch, allocation: Sequence[Node], env: Mapping[str, str] = os.environ
    ) -> None:
        if count > len(allocation):
            hint = f"sbatch --nodes={count}, or fewer --nodes and --spares"
            raise SchedulerError(f"{count} nodes of an allocation of {len(allocation)}", hint=hint)
        super().__init__(agent, allocation[:count], allocation[count:], RELEASE_GRACE_S)
        self._env = dict(env)

    async def start_agent(self, node: str) -> None:
        self._check_held(node)
        await self._end(node)
        env = self._env | self._agent.variables(self._held[node]) | {SECRET_VARIABLE: self._agent.secret}
        command = ["srun", *_STEP, f"--nodelist={node}", *self.step_command()]
        self._processes.start(node, command, env, self._agent.log(self._held[node]))

    async def next_end(self) -> AgentEnd:
        """Wait for the end of a step: after the loss of a node for Slurm's SlurmdTimeout, and with status 0."""
        end = await super().next_end()
        of_agent = tuple(line for line in end.last_lines if not line.startswith(_SLURM_LINES))
        return replace(end, last_lines=of_agent or end.last_lines)

    async def exclude(self, node: str, reason: str, until: float | None) -> None:
        await super().exclude(node, reason, until)
        if self._env.get(DRAIN_VARIABLE) == "1":
            await self._tell("update", f"NodeName={node}", "State=DRAIN", f"Reason=megascale: {reason}")
        if successor := self._env.get(SUCCESSOR_VARIABLE):
            now = time.time()
            names = ",".join(name for name, end in self._excluded.items() if end > now)
            await self._tell("update", f"JobId={successor}", f"ExcNodeList={names}")

    async def request(self, count: int) -> Sequence[Node]:
        if not (new := self._take(count)):
            raise SchedulerError("the allocation has no further node")
        return tuple(new)

    async def stop(self, requeue: bool, grace_s: float) -> None:
        await self._processes.end([*self._held], STOP_GRACE_S if grace_s else 0.0)
        successor = self._env.get(SUCCESSOR_VARIABLE)
        if successor and not requeue:
            await run("scancel", successor)

    def step_command(self) -> list[str]:
        """Return the command of a step. In the shell of salloc the driver is on no node of the job."""
        if driver := self._env.get("SLURMD_NODENAME"):
            return ["sh", "-c", _STEP_SCRIPT, driver, *self._agent.command]
        return list(self._agent.command)

    async def _tell(self, *arguments: str) -> None:
        """Run scontrol; a refusal stands in the output of the supervisor, because the job goes on without."""
        status, output = await run("scontrol", *arguments)
        if status:
            print(f"megascale: scontrol {' '.join(arguments)}: {output}", file=sys.stderr, flush=True)
