"""The scheduler port (`Scheduler`): nodes of a job, their agents, eviction and replacement of nodes.

`adapters` has them by name: processes of this host or hosts of a testbed, nodes of a Slurm allocation, a JobSet of
Kubernetes, or none. An adapter belongs to the supervisor of `megascale launch`, the parent of the driver and of all
agents, so that agents outlive a driver. A driver in a process of its own calls it through `remote.SchedulerClient`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megascale.core.errors import Exit, MegascaleError
from megascale.core.process import module_command
from megascale.core.rank import NODE_VARIABLE

ADDRESS_VARIABLE = "MEGASCALE_NODE_ADDRESS"
"""Environment variable of an agent: the name or address by which other nodes reach its node."""

DRIVER_VARIABLE = "MEGASCALE_DRIVER"  # environment variable of an agent: `host:port` of the driver

SLOTS_VARIABLE = "MEGASCALE_NODE_SLOTS"
"""Environment variable of an agent: ranks that its node runs, each with a device; by default one a usable core."""

LAUNCH_VARIABLE = "MEGASCALE_LAUNCH"  # environment variable of all processes of a launch: a random id

AGENT_COMMAND = tuple(module_command("megascale", "agent"))


class SchedulerError(MegascaleError):
    """A scheduler that cannot be used, or a node that does not start."""

    exit_status = Exit.CONFIG


@dataclass(frozen=True)
class Node:
    """A node of the job. `name`: unique in the job; `address`: name or IP address by which other nodes reach it."""

    name: str
    address: str


@dataclass(frozen=True)
class AgentEnd:
    """The end of a node's agent. `status`: exit status, negative for a signal; `last_lines`: end of its output."""

    node: str
    status: int
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class AgentLaunch:
    """How agents are started. `driver`: its `host:port`; `secret`: the job's, never on a command line; `logs`: folder
    of the agents' output, agent-NODE.log; `slots`: ranks of a node, 0 for one a core.
    """

    driver: str
    secret: str = field(repr=False)
    logs: Path
    command: Sequence[str] = AGENT_COMMAND
    slots: int = 0

    def variables(self, node: Node) -> dict[str, str]:
        """Return the variables of a node's agent, without the secret."""
        names = {NODE_VARIABLE: node.name, ADDRESS_VARIABLE: node.address, DRIVER_VARIABLE: self.driver}
        slots = {SLOTS_VARIABLE: str(self.slots)} if self.slots else {}
        return slots | names

    def log(self, node: Node) -> Path:
        """Return the file of the agent's output."""
        return self.logs / f"agent-{node.name}.log"


class Scheduler(Protocol):
    """A scheduler as the driver sees it. Nodes are named; all methods belong to one event loop."""

    async def nodes(self) -> Sequence[Node]:
        """Return the nodes that the job holds, spares included, in the order in which ranks fill nodes."""

    async def without_agent(self) -> Sequence[str]:
        """Return the held nodes whose agents do not run, of those that `start_agent` starts."""

    async def start_agent(self, node: str) -> None:
        """Start the agent of a held node; its earlier agent has ended, or is killed. Raises: SchedulerError"""

    async def next_end(self) -> AgentEnd:
        """Wait for the end of an agent that was neither released nor stopped. A lost node may end no agent for minutes:
        only heartbeats tell.
        """

    async def exclude(self, node: str, reason: str, until: float | None) -> None:
        """Never give the node to the job again before `until`, in seconds since 1970; None: for the whole job. The node
        stays held until its release.
        """

    async def request(self, count: int) -> Sequence[Node]:
        """Ask for further nodes; returns up to `count` that the job now holds, without agents, or none where nodes join
        by themselves. Raises: SchedulerError if there is no further node
        """

    async def release(self, node: str) -> None:
        """Kill everything that the job runs on a node, as far as the node is reachable, and give the node back."""

    async def stop(self, requeue: bool, grace_s: float) -> None:
        """End all agents, and kill them after `grace_s` seconds, or what the scheduler allows. `requeue`: False tells
        the scheduler to start the job no more.
        """
