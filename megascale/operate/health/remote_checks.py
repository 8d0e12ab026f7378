"""Checks on nodes with agents: a Check is sent, and awaited until its CheckDone comes or its node is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from megascale.operate.channel.messages import Check, CheckDone
from megascale.operate.health.checks.result import CheckError, CheckResult

ANSWER_S = 10.0  # seconds beyond the timeout of a check in which its agent must answer


class RemoteChecks:
    """Runs checks through `send`, which sends a message to the agent of a node. `run` serves `health.diagnose`.

    The owner passes on CheckDone messages and lost nodes.
    """

    def __init__(self, send: Callable[[str, Check], object]) -> None:
        self._send = send
        self._ids = itertools.count()
        self._awaited: dict[tuple[str, int], asyncio.Future[CheckResult]] = {}

    async def run(self, node: str, name: str, arguments: Mapping[str, Any], timeout_s: float) -> CheckResult:
        """Run a check on a node. A node without an answer has a result with a problem."""
        order = Check(next(self._ids), name, arguments, timeout_s)
        done = self._awaited[node, order.id] = asyncio.get_running_loop().create_future()
        self._send(node, order)
        try:
            async with asyncio.timeout(timeout_s + ANSWER_S):
                return await done
        except TimeoutError:
            return CheckResult(name, problem=f"its agent did not answer within {timeout_s + ANSWER_S:.0f} s")
        finally:
            del self._awaited[node, order.id]

    def receive(self, node: str, message: CheckDone) -> None:
        """Take the answer of an agent; one that nobody waits for any more is dropped."""
        done = self._awaited.get((node, message.id))
        if done is None or done.done():
            return
        try:
            error = message.error
            result = CheckResult(message.name, problem=error) if error else CheckResult.from_dict(message.result)
        except CheckError as unknown:
            result = CheckResult(message.name, problem=str(unknown))
        done.set_result(result)

    def lose(self, node: str) -> None:
        """Answer for a node whose agent is lost."""
        for (awaited, _), done in self._awaited.items():
            if awaited == node and not done.done():
                done.set_result(CheckResult("", problem="its agent was lost during the check"))
