"""A scheduler in another process: the driver calls the adapter of its supervisor over a socket pair.

A line of JSON each way: `{"id": 1, "call": "release", "arguments": ["node3"]}`, answered by `{"id": 1, "result": ...}`
or `{"id": 1, "error": message, "hint": hint}`. Calls overlap: `next_end` waits while others are answered. A client
also sends `{"beat": true}` every BEAT_S, by which the supervisor sees that the driver's event loop runs, and
`{"ended": status}` once the job has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from megascale.core.errors import MegascaleError
from megascale.operate.driver.scheduler.port import AgentEnd, Node, Scheduler, SchedulerError
from megascale.operate.print_line import print_line

CALLS = ("nodes", "without_agent", "start_agent", "next_end", "exclude", "request", "release", "stop")

BEAT_S = 1.0  # seconds between the beats of a client

MOST_LINE_BYTES = 1 << 26
"""Most bytes of a line: the nodes of a job of 10,000 take half a mebibyte, and asyncio's default is 64 KiB."""

MOST_REASON = 1000  # most characters of the reason for an exclusion, which may be the message of any error


async def serve(
    scheduler: Scheduler,
    connection: socket.socket,
    heard: Callable[[], object] = lambda: None,
    ended: Callable[[int], object] = lambda status: None,
) -> None:
    """Answer the calls of a driver until it hangs up; its calls that still wait are cancelled.

    `heard` is called at each of its beats, `ended` with the status of a job that has ended. A driver that sends
    anything else than such lines is hung up on.
    """
    reader, writer = await asyncio.open_connection(sock=connection, limit=MOST_LINE_BYTES)
    calls: set[asyncio.Task[None]] = set()
    try:
        while line := await reader.readline():
            message = json.loads(line)
            if "beat" in message:
                heard()
                continue
            if "ended" in message:
                ended(message["ended"])
                continue
            task = asyncio.create_task(_answer(scheduler, message, writer))
            calls.add(task)
            task.add_done_callback(calls.discard)
    except ConnectionError:
        pass  # killed in the middle of a call
    except ValueError as error:
        print_line(f"the driver sent what is no call of a scheduler: {error}")
    finally:
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        writer.close()


async def _answer(scheduler: Scheduler, call: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    try:
        if call["call"] not in CALLS:
            raise SchedulerError(f"no call of a scheduler: {call['call']}")
        answer = {"result": _plain(await getattr(scheduler, call["call"])(*call["arguments"]))}
    except MegascaleError as error:
        answer = {"error": error.message, "hint": error.hint}
    except OSError as error:  # else the driver would wait for its answer for ever
        answer = {"error": f"{call['call']}: {error}", "hint": ""}
    with contextlib.suppress(ConnectionError):
        writer.write(json.dumps({"id": call["id"], **answer}).encode() + b"\n")
        await writer.drain()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


class SchedulerClient:
    """`Scheduler` of the supervisor at the other end of a socket pair. Calls raise SchedulerError after its end.

    An `AgentEnd` for a cancelled `next_end` is lost: keep a single call waiting.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read(reader))
        self._beating = asyncio.create_task(self._beat())

    @classmethod
    async def connect(cls, connection: socket.socket) -> SchedulerClient:
        """Return the client at one end of a socket pair."""
        return cls(*await asyncio.open_connection(sock=connection, limit=MOST_LINE_BYTES))

    async def nodes(self) -> Sequence[Node]:
        return [Node(**each) for each in await self._call("nodes")]

    async def without_agent(self) -> Sequence[str]:
        return tuple(await self._call("without_agent"))

    async def start_agent(self, node: str) -> None:
        await self._call("start_agent", node)

    async def next_end(self) -> AgentEnd:
        end = await self._call("next_end")
        return AgentEnd(end["node"], end["status"], tuple(end["last_lines"]))

    async def exclude(self, node: str, reason: str, until: float | None) -> None:
        await self._call("exclude", node, reason[:MOST_REASON], until)

    async def request(self, count: int) -> Sequence[Node]:
        return [Node(**each) for each in await self._call("request", count)]

    async def release(self, node: str) -> None:
        await self._call("release", node)

    async def stop(self, requeue: bool, grace_s: float) -> None:
        await self._call("stop", requeue, grace_s)

    def report_end(self, status: int) -> None:
        """Say that the job has ended: the log, on a full disk, may not."""
        self._send({"ended": status})

    async def close(self) -> None:
        """Hang up, once all is sent."""
        self._reading.cancel()
        self._beating.cancel()
        await asyncio.gather(self._reading, self._beating, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _call(self, name: str, *arguments: object) -> Any:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send({"id": number, "call": name, "arguments": arguments})
        try:
            if self._reading.done():
                raise SchedulerError("the supervisor has ended")
            return await answer
        finally:
            del self._waiting[number]

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _beat(self) -> None:
        while not self._reading.done():
            self._send({"beat": True})
            await asyncio.sleep(BEAT_S)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                while line := await reader.readline():
                    message = json.loads(line)
                    answer = self._waiting.get(message["id"])
                    if answer is None or answer.done():  # its caller was cancelled
                        continue
                    if "error" in message:
                        answer.set_exception(SchedulerError(message["error"], hint=message["hint"]))
                    else:
                        answer.set_result(message["result"])
        finally:  # whatever ended it, nobody is left waiting
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(SchedulerError("the supervisor has ended"))
