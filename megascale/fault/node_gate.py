"""Checks of a job's nodes by the driver: each before it joins, and the nodes of a fault before ranks start there again;
after a fault of the network, the paths between all nodes.

The set "join" takes about a second on a host without GPUs. A node fails by a wrong or impossible result, or by a value
that is low beside those of the nodes that have joined before. Nodes that share a host with another are not compared:
they take the host's cores from each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

from megascale.fault.checks.result import CheckResult
from megascale.fault.diagnose import DiagnosisPlan, check_joining, diagnose
from megascale.fault.messages import Hello
from megascale.fault.node_runs import CheckedNode
from megascale.fault.remote_checks import RemoteChecks

LATE_S = 2.0
"""Seconds that a node, once measured, waits for others at most, beyond the time of its own checks."""


class NodeGate:
    """Checks nodes through `checks`, and remembers the results of good ones."""

    def __init__(self, checks: RemoteChecks, timeout_s: float, tolerance: float) -> None:
        self._checks = checks
        self._plan = DiagnosisPlan(checks="join", timeout_s=timeout_s, tolerance=tolerance)
        self._paths_plan = DiagnosisPlan(checks="", pairs=(), timeout_s=timeout_s)
        self._results: dict[str, tuple[str, Sequence[CheckResult]]] = {}
        self._measuring: dict[str, asyncio.Event] = {}

    async def examine(self, hello: Hello) -> str:
        """Check a node; return why it must not run ranks, "" for a good node."""
        start, measured = time.monotonic(), asyncio.Event()
        self._measuring[hello.node] = measured

        async def others(results: Sequence[CheckResult]) -> Mapping[str, Sequence[CheckResult]]:
            self._results[hello.node] = hello.host, results
            measured.set()
            await self._wait_for_others(time.monotonic() - start + LATE_S)
            return self._others(hello)

        node = _checked_node(hello)
        try:
            results, bad = await check_joining(node, self._checks.run, others, self._plan)
        finally:
            measured.set()
        self._results[hello.node] = hello.host, results
        if bad:
            del self._results[hello.node]
        return "; ".join(f"{verdict.check}: {verdict.reason}" for verdict in bad)

    async def examine_paths(self, hellos: Sequence[Hello]) -> tuple[dict[str, str], Mapping[tuple[str, str], str]]:
        """Check which nodes reach each other; return reasons by bad node, and by bad link between other nodes."""
        found = await diagnose([_checked_node(hello) for hello in hellos], self._checks.run, self._paths_plan)
        nodes = {verdict.node: verdict.reason for verdict in found.verdicts if verdict.check == "reach" and verdict.bad}
        return nodes, found.bad_links

    async def _wait_for_others(self, timeout_s: float) -> None:
        """Wait until the nodes that are being measured have results: the first nodes of a job join at the same time."""
        pending = [event.wait() for event in self._measuring.values() if not event.is_set()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*pending)

    def _others(self, hello: Hello) -> dict[str, Sequence[CheckResult]]:
        """Return the results to compare a node with."""
        others = {node: known for node, known in self._results.items() if node != hello.node}
        if any(host == hello.host for host, _ in others.values()):
            return {}
        return {node: results for node, (_, results) in others.items()}


def _checked_node(hello: Hello) -> CheckedNode:
    return CheckedNode(hello.node, hello.address, hello.slots)
