"""Checks of a job's nodes by the driver: each before it joins, and the nodes of a fault before ranks start there again;
after a fault of the network, the paths between all nodes.

The set "join" takes about a second on a host without GPUs. A node fails by a wrong or impossible result, or by a value
that is low beside those of the nodes that have joined before. Nodes that share a host with another are not compared:
they take the host's cores from each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence

from megascale.operate.channel.ends import Disconnected
from megascale.operate.channel.messages import AgentMessage, Check, CheckDone, Hello
from megascale.operate.driver.commands import CheckNodes, Command, Say
from megascale.operate.driver.decisions import ends_to_replace
from megascale.operate.driver.job import Job
from megascale.operate.health.checks.result import CheckResult
from megascale.operate.health.diagnose import DiagnosisPlan, check_joining, diagnose
from megascale.operate.health.node_runs import CheckedNode
from megascale.operate.health.remote_checks import RemoteChecks

LATE_S = 2.0  # seconds that a node, once measured, waits for others at most, beyond the time of its own checks

MOST_COMPARED = 64
"""Most hosts with whose values a joining node's are compared. More would hardly change the median, and the work of a
launch would grow with the square of its nodes.
"""


class NodeAdmission:
    """Checks nodes through `checks`, and remembers the results of good ones."""

    def __init__(self, checks: RemoteChecks, timeout_s: float, tolerance: float) -> None:
        self._checks = checks
        self._plan = DiagnosisPlan(checks="join", timeout_s=timeout_s, tolerance=tolerance)
        self._paths_plan = DiagnosisPlan(checks="", pairs=(), timeout_s=timeout_s)
        self._results: dict[str, dict[str, Sequence[CheckResult]]] = {}  # by host, then by node
        self._measuring: set[object] = set()
        self._all_measured = asyncio.Event()
        self._turn = asyncio.Lock()

    async def examine(self, hello: Hello) -> str:
        """Check a node; return why it must not run ranks, "" for a good node."""
        start, examination = time.monotonic(), object()
        self._measuring.add(examination)
        self._all_measured.clear()

        async def others(results: Sequence[CheckResult]) -> Mapping[str, Sequence[CheckResult]]:
            self._results.setdefault(hello.host, {})[hello.node] = results
            self._end_measuring(examination)
            with contextlib.suppress(TimeoutError):  # the first nodes of a job join at the same time
                async with asyncio.timeout(time.monotonic() - start + LATE_S):
                    await self._all_measured.wait()
            async with self._turn:  # one comparison in each turn of the event loop, which has other work
                await asyncio.sleep(0)
            return self._others(hello.host)

        try:
            results, bad = await check_joining(_checked_node(hello), self._checks.run, others, self._plan)
        finally:
            self._end_measuring(examination)
        on_host = self._results.setdefault(hello.host, {})
        if bad:
            on_host.pop(hello.node, None)  # absent if the node was examined twice at a time
        else:
            on_host[hello.node] = results
        if not on_host:
            del self._results[hello.host]
        return "; ".join(f"{verdict.check}: {verdict.reason}" for verdict in bad)

    async def examine_paths(self, hellos: Sequence[Hello]) -> tuple[dict[str, str], Mapping[tuple[str, str], str]]:
        """Check which nodes reach each other; return reasons by bad node, and by bad link between other nodes."""
        found = await diagnose([_checked_node(hello) for hello in hellos], self._checks.run, self._paths_plan)
        nodes = {verdict.node: verdict.reason for verdict in found.verdicts if verdict.check == "reach" and verdict.bad}
        return nodes, found.bad_links

    def _end_measuring(self, examination: object) -> None:
        self._measuring.discard(examination)
        if not self._measuring:
            self._all_measured.set()

    def _others(self, host: str) -> dict[str, Sequence[CheckResult]]:
        """Return the results to compare the node of a host with: of many hosts some, evenly spread."""
        if len(self._results.get(host, ())) > 1:
            return {}
        hosts = list(self._results)[:: max(1, math.ceil(len(self._results) / MOST_COMPARED))]
        return {node: some for one in hosts if one != host for node, some in self._results[one].items()}


class NodeGate:
    """Lets nodes join `job` once they are checked, and takes out those that fail.

    `send` sends a message to the agent of a node, `perform` carries out the job's commands, `now` is the driver's
    clock. `examinations`: that are not done.
    """

    def __init__(
        self,
        job: Job,
        send: Callable[[str, Check], object],
        perform: Callable[[Sequence[Command]], None],
        now: Callable[[], float],
    ) -> None:
        self._job = job
        self._perform = perform
        self._now = now
        self._checks = RemoteChecks(send)
        self._admission = NodeAdmission(self._checks, job.settings.check_timeout_s, job.settings.check_tolerance)
        self._waiting: dict[str, Hello] = {}
        self.examinations: set[asyncio.Task[None]] = set()

    def takes(self, node: str, message: AgentMessage | Disconnected) -> bool:
        """Take a message that concerns checks alone, and return True then: results, and a node that wants to join and
        runs no ranks.
        """
        match message:
            case Disconnected():
                self._waiting.pop(node, None)
                self._checks.lose(node)
            case CheckDone():
                self._checks.receive(node, message)
                return True
            case Hello(attempt=None, observer=False):
                roster = self._job.roster
                if node not in roster.members and node not in roster.excluded:
                    self._examine(message)
                    return True
        return False

    def check_nodes(self, command: CheckNodes) -> None:
        """Check nodes after an incident."""
        members = self._job.roster.members
        hellos = [members[node].hello for node in command.nodes if node in members]
        if command.paths:
            self._begin(self._examine_paths(hellos, command.report))
        elif not command.report:
            for hello in hellos:
                self._examine(hello)

    def _begin(self, examination: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(examination)
        self.examinations.add(task)
        task.add_done_callback(self.examinations.discard)

    def _examine(self, hello: Hello) -> None:
        """Check a node, whose agent joins or runs ranks again if the node is good."""
        self._waiting[hello.node] = hello
        self._begin(self._finish_examination(hello))

    async def _examine_paths(self, hellos: Sequence[Hello], report: bool) -> None:
        """Check which nodes reach each other. Unless this is a `report`, a node that is not reached leaves the job, and
        an end of a bad link if there is a spare.
        """
        nodes, links = await self._admission.examine_paths(hellos)
        found = {f"link {a} - {b}": reason for (a, b), reason in links.items()}
        found |= {f"node {node}": reason for node, reason in nodes.items()}
        self._perform([Say(f"{what}: {reason}") for what, reason in found.items()])
        reasons = nodes | ends_to_replace(self._job, list(links), len(nodes))
        for hello in hellos if not report else ():
            self._perform(self._job.checked(hello.node, reasons.get(hello.node, ""), self._now()))

    async def _finish_examination(self, hello: Hello) -> None:
        reason = await self._admission.examine(hello)
        if self._waiting.get(hello.node) is not hello:
            return  # the agent was lost, or has begun anew
        del self._waiting[hello.node]
        now, joined = self._now(), hello.node in self._job.roster.members
        if not reason and not joined:
            self._perform(self._job.receive(hello.node, hello, now))
        self._perform(self._job.checked(hello.node, reason, now))


def _checked_node(hello: Hello) -> CheckedNode:
    return CheckedNode(hello.node, hello.address, hello.slots)
