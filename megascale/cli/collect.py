"""`megascale collect`: the agent of a run's ranks on this host that torchrun or srun has started, without a job's
driver: it finds them, collects their events and serves their metrics. The first rank of each launcher starts one; of
several the first collects from all.

Its standard input is a pipe from that rank, and ends when the rank does. The process ends soon after the last rank.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.core.errors import Exit
from megascale.core.files import SHARED_MEMORY, lock_to_build
from megascale.core.process import blocking_stops, ignore_stops, module_command, process_exists
from megascale.operate.print_line import print_line
from megascale.record.log_files import folder_key

if TYPE_CHECKING:
    from megascale.config.train import ObserveConfig
    from megascale.operate.channel.ends import DriverEnd
    from megascale.operate.channel.messages import Welcome

LAST_ROWS_S = 5.0  # seconds that a rank that ends in order waits for its collector, which a container may end with it
POLL_S = 0.5  # seconds between looks for ranks, and for the lock of another collector


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    sub.add_argument("folder", type=Path, help="the run's folder, whose key is in the ranks' flight records")
    sub.add_argument("--metrics-address", default="127.0.0.1", help="observe.metrics_address")
    sub.add_argument("--metrics-port", type=int, default=0, help="observe.metrics_port")


@contextlib.contextmanager
def collector_process(folder: Path, observe: ObserveConfig) -> Iterator[None]:
    """Collect from the ranks of the run in `folder` on this host, in a process of its own, until they have ended. This
    process, which is one of them, trains in the `with` block.
    """
    words = module_command("megascale", "collect", str(folder))
    words += ["--metrics-address", observe.metrics_address, "--metrics-port", str(observe.metrics_port)]
    try:  # in a session of its own: torchrun ends the sessions of its ranks
        with blocking_stops():
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"WARNING: no event store, because its collector cannot be started: {error}", file=sys.stderr)
        yield
        return
    yield
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_ROWS_S)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    ignore_stops()  # they are for the ranks, whose last events are collected
    os.nice(10)
    first = os.getppid()
    mark = SHARED_MEMORY / f"megascale-{os.geteuid()}-{folder_key(options.folder):x}"
    try:
        while (lock := lock_to_build(mark)) is None:
            if select.select([sys.stdin.fileno()], [], [], POLL_S)[0] or os.getppid() != first:
                return Exit.OK
    except OSError as error:
        print_line(f"WARNING: no event store, because {error.filename} cannot be opened: {error.strerror}")
        return Exit.UNCLASSIFIED
    with lock:
        try:
            asyncio.run(_collect(options, first))
        finally:
            Path(lock.name).unlink(missing_ok=True)
    return Exit.OK


async def _collect(options: argparse.Namespace, first: int) -> None:
    """Collect until all ranks have ended. `first`: the process of the rank that started this one."""
    from megascale.operate.channel.ends import AgentEnd, DriverEnd
    from megascale.operate.channel.messages import Welcome
    from megascale.operate.node.agent import Agent
    from megascale.operate.node.observed_ranks import ObservedRanks
    from megascale.operate.node.ranks import NodePlace

    folder, host, end = options.folder, socket.gethostname(), DriverEnd()
    place = NodePlace(host, host, "", 0, run=folder.name, folder=folder, alone=True)
    observe = functools.partial(ObservedRanks, folder, collected=True)
    agent = Agent(place, functools.partial(AgentEnd, end), -1, observe, print_line)
    address, port = options.metrics_address, options.metrics_port
    welcome = Welcome(POLL_S, POLL_S, 0.0, 0.0, folder.name, str(folder), address, port)
    async with asyncio.TaskGroup() as group:
        group.create_task(agent.run(heeds_signals=False))
        group.create_task(_drive(end, welcome, first))


async def _drive(end: DriverEnd, welcome: Welcome, first: int) -> None:
    """Take the part of a driver: let the agent leave once the first rank, which may wait for it, and all others have
    ended.
    """
    from megascale.operate.channel.ends import Disconnected
    from megascale.operate.channel.messages import Heartbeat, Leave

    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
    node, _ = await anext(end)
    end.send(node, welcome)

    def take_end() -> None:
        loop.remove_reader(stdin)
        end.inbox.put_nowait((node, Disconnected("the first rank has ended")))

    loop.add_reader(stdin, take_end)
    pids, has_ended = set[int](), False
    async for _, message in end:
        if isinstance(message, Heartbeat):
            pids = {status.pid for status in message.ranks if process_exists(status.pid)}  # `first` may be gone
        has_ended = has_ended or isinstance(message, Disconnected) or os.getppid() != first
        if has_ended and pids <= {first}:
            end.send(node, Leave(""))
            return
