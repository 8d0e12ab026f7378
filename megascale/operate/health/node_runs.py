"""Checks on several nodes: at once, or in turns where the nodes share a host."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megascale.core.errors import MegascaleError
from megascale.operate.health.checks.result import CheckResult

RunOnNode = Callable[[str, str, Mapping[str, Any], float], Awaitable[CheckResult]]
"""Function (node, check, arguments, timeout in seconds): run a check on a node."""


@dataclass(frozen=True)
class CheckedNode:
    """A node under diagnosis. `host`: name or address by which other nodes reach it; `slots`: devices or ranks."""

    node: str
    host: str
    slots: int = 1


@dataclass(frozen=True)
class NodeRuns:
    """Runs checks by `run` on nodes, `places` by name. `arguments`: of all checks; `at_once`: not in turns."""

    places: Mapping[str, CheckedNode]
    run: RunOnNode
    arguments: Mapping[str, Any]
    timeout_s: float
    at_once: bool
    groups: Iterator[int] = field(default_factory=itertools.count)

    async def run_on(
        self,
        nodes: Iterable[str],
        name: str,
        arguments: Mapping[str, Mapping[str, Any]] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, CheckResult]:
        """Run a check on some nodes, with further arguments by node."""
        names, more = list(nodes), arguments or {}
        calls = [self.run_on_one(node, name, more.get(node, {}), timeout_s) for node in names]
        results = await asyncio.gather(*calls) if self.at_once else [await call for call in calls]
        return dict(zip(names, results, strict=True))

    async def run_on_one(
        self, node: str, name: str, arguments: Mapping[str, Any], timeout_s: float | None = None
    ) -> CheckResult:
        """Run a check on a node; a node that does not answer has a result that says why."""
        place = self.places[node]
        given = {**self.arguments, "slots": place.slots, "host": place.host, **arguments}
        try:
            return await self.run(node, name, given, timeout_s or self.timeout_s)
        except (OSError, MegascaleError) as error:
            return CheckResult(name, problem=str(error))

    async def run_as_group(self, nodes: Sequence[str], name: str, endpoint: str) -> list[CheckResult]:
        """Run a check of a group whose ranks are the slots of `nodes`. `endpoint`: address of the first node's."""
        world = sum(self.places[node].slots for node in nodes)
        key, first, calls = f"group {next(self.groups)}", 0, []
        for node in nodes:
            ranks = list(range(first, first + self.places[node].slots))
            first += len(ranks)
            group = {"world": world, "ranks": ranks, "endpoint": endpoint, "key": key}
            calls.append(self.run_on_one(node, name, {"group": group}))
        return await asyncio.gather(*calls)
