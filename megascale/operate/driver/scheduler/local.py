"""The local scheduler: a node is an agent and its processes on this host, or on a host of a testbed.

A node is lost when all its processes are gone; a replacement is a new node, with a new name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megascale.core.network import LOOPBACK
from megascale.core.rank import NODE_VARIABLE
from megascale.operate.channel.secret import DESCRIPTOR_VARIABLE, secret_descriptor
from megascale.operate.driver.scheduler.port import LAUNCH_VARIABLE, AgentLaunch, Node, SchedulerError
from megascale.operate.driver.scheduler.processes import HeldNodes

_DEATH_S = 10.0  # limit for the end of killed processes

TESTBED_VARIABLE = "MEGASCALE_TESTBED"
"""Environment variable of `megascale launch --scheduler testbed`, which runs on the first host of an open testbed: the
hosts, in JSON.
"""


@dataclass(frozen=True)
class NodeHost:
    """The host of a node. `prefix`: words before a command to run it there; `environment`: further variables."""

    address: str
    prefix: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def hosts_from_environment(env: Mapping[str, str] = os.environ) -> list[NodeHost]:
    """Return the hosts of the open testbed. Raises: SchedulerError without one"""
    if TESTBED_VARIABLE not in env:
        raise SchedulerError(f"{TESTBED_VARIABLE} is not set", hint="--scheduler local, or open a testbed first")
    return [NodeHost(**each) for each in json.loads(env[TESTBED_VARIABLE])]


class LocalScheduler(HeldNodes):
    """`Scheduler` on this host: node0 to node{count-1} at first, and more on request.

    `hosts`: of a testbed, host i for node i; their number limits the nodes.
    """

    def __init__(self, count: int, agent: AgentLaunch, hosts: Sequence[NodeHost] | None = None) -> None:
        self._hosts = hosts
        if hosts is not None and count > len(hosts):
            raise SchedulerError(f"{count} nodes on a testbed of {len(hosts)} hosts")
        self.launch = secrets.token_hex(8)
        self._given = count
        super().__init__(agent, map(self._node, range(count)))

    async def start_agent(self, node: str) -> None:
        self._check_held(node)
        await self._end(node)
        host = self._host(int(node.removeprefix("node")))
        command = [*host.prefix, *self._agent.command]
        env = dict(os.environ) | dict(host.environment) | self._agent.variables(self._held[node])
        env[LAUNCH_VARIABLE] = self.launch
        with secret_descriptor(self._agent.secret) as secret:
            env[DESCRIPTOR_VARIABLE] = str(secret)
            self._processes.start(node, command, env, self._agent.log(self._held[node]), [secret])

    async def request(self, count: int) -> Sequence[Node]:
        again = self._take(count)
        wanted = count - len(again)
        limit = wanted if self._hosts is None else min(wanted, len(self._hosts) - self._given)
        if not again and not limit:
            raise SchedulerError("there is no further node")
        new = [*map(self._node, range(self._given, self._given + limit))]
        self._given += limit
        self._held |= {node.name: node for node in new}
        return (*again, *new)

    async def stop(self, requeue: bool, grace_s: float) -> None:
        await self._processes.end(list(self._held), grace_s)
        for node in self._held:
            await self._end(node)

    def processes(self, node: str) -> list[int]:
        """Return the processes of a node: its agent, ranks and their children."""
        return node_processes(self.launch, node)

    async def _end(self, node: str) -> None:
        await super()._end(node)
        deadline = time.monotonic() + _DEATH_S
        while pids := self.processes(node):
            if time.monotonic() > deadline:
                raise SchedulerError(f"processes {pids} of node {node} do not end", hint="see /proc/PID/stack")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)

    def _node(self, number: int) -> Node:
        return Node(f"node{number}", self._host(number).address)

    def _host(self, number: int) -> NodeHost:
        return NodeHost(LOOPBACK) if self._hosts is None else self._hosts[number]


def node_processes(launch: str, node: str) -> list[int]:
    """Return the processes of this host whose environment names the launch and the node."""
    marks = {f"{LAUNCH_VARIABLE}={launch}".encode(), f"{NODE_VARIABLE}={node}".encode()}
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if marks <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                found.append(int(pid))
    return sorted(found)
