"""Workers: the processes of the ranks that a launcher or an agent has started on this host.

`Launch.start` starts a rank, whose process dies with its parent; `ending` ends ranks in bounded time. Whoever waits for
ends polls `Worker.ended`, or waits for `Worker.process` in an event loop and calls it then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.core.errors import MegascaleError
from megascale.core.limits import os_error_hint
from megascale.core.network import is_loopback
from megascale.core.process import STOP_ORDER, die_with_parent, module_command
from megascale.core.rank import NODE_VARIABLE, STORE_VARIABLE
from megascale.core.run_folder import TOKEN_VARIABLE
from megascale.operate.channel.messages import RankEnd, Start
from megascale.operate.channel.secret import DESCRIPTOR_VARIABLE
from megascale.operate.node.failure import ERROR_FILE, ERROR_FILE_NAME
from megascale.record.log_files import ATTEMPT_VARIABLE

if TYPE_CHECKING:
    from megascale.operate.node.standby_process import StandbyProcess

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

KILL_S = 5.0
"""Seconds in which a killed process must end. One in uninterruptible sleep, on a dead disk or file server, does not."""

_POLL_S = 0.05


@dataclass
class Worker:
    """The process of a rank. `log`: the file of its output; None if it shares the terminal. `end`: once it was seen.
    `orders`: to stop, so far.
    """

    rank: int
    process: subprocess.Popen
    log: Path | None
    end: RankEnd | None = None
    orders: int = 0

    def ended(self) -> RankEnd | None:
        """Return the end of the process, at the time at which it was first seen; None while the process runs. Its
        process group is killed then: the rank's children may hold memory of its device.
        """
        if self.end is None:
            with contextlib.suppress(ChildProcessError):  # it was waited for already
                if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return None
                with contextlib.suppress(ProcessLookupError):  # until it is waited for, no other group has its number
                    os.killpg(self.process.pid, signal.SIGKILL)
            # not `wait`: a signal handler that comes here while it runs would wait for its lock for ever
            if (status := self.process.poll()) is None:
                return None
            self.end = RankEnd(self.rank, status, time.time())
        return self.end

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.ended() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)  # `send_signal` would wait for a process that has just ended

    def stop(self, *, save: bool) -> None:
        """Order the rank to end at once (two orders in all); with `save`, to save before (one order). Orders given
        before are not repeated.
        """
        for _ in range(self.orders, 1 if save else 2):
            self.signal(STOP_ORDER)
            self.orders += 1


@dataclass(frozen=True)
class Launch:
    """The ranks of a job on this host, as `python -m megascale ARGUMENTS`. `ranks`: in the order of their local ranks.

    `store`: host:port of the job's store; `secret`: descriptor of the job's secret. `logs`: folder of the ranks' error
    files, rank-N.error.json, and of their output, rank-N.log. `env`: further variables of all ranks.
    """

    arguments: Sequence[str]
    world: int
    ranks: Sequence[int]
    store: str
    secret: int
    logs: Path
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_order(cls, order: Start, node: str, secret: int) -> Launch:
        """Return the launch that a driver has ordered. `node`: "" if nothing starts its ranks again."""
        restarts = {NODE_VARIABLE: node, ATTEMPT_VARIABLE: str(order.attempt)} if node else {}
        token = {TOKEN_VARIABLE: order.folder.token} if order.folder else {}
        env = {**restarts, **token, **order.env}
        if is_loopback(order.store.rpartition(":")[0]):
            env.setdefault(GLOO_INTERFACE, os.environ.get(GLOO_INTERFACE, "lo"))
        return cls(order.arguments, order.world, order.ranks, order.store, secret, Path(order.logs), env)

    def start(
        self, rank: int, *, listener: socket.socket | None = None, log: Path | None = None, env: Mapping[str, str] = {}
    ) -> Worker:
        """Start a rank in a new process. `listener`: on rank 0, the socket that listens at `store`. `log`: None for
        this process's own output. `env`: further variables of the rank.

        Raises: MegascaleError if it cannot be started
        """
        descriptors = self._descriptors(listener)
        numbered = {name: f"{text}{number}" for name, (text, number) in descriptors.items()}
        parent = os.getpid()
        try:
            with open(log, "wb") if log else contextlib.nullcontext() as output:
                process = subprocess.Popen(
                    module_command("megascale", *self.arguments),
                    env=self._variables(rank, env) | numbered,
                    stdout=output,
                    stderr=subprocess.STDOUT if log else None,
                    pass_fds=[number for _, number in descriptors.values()],
                    start_new_session=True,  # Ctrl-C reaches the parent only, which decides
                    preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  a call of the kernel, no lock
                )
        except OSError as error:
            what = f"rank {rank} of {self.world} cannot be started on {socket.gethostname()}: {error.strerror}"
            hint = os_error_hint(error, "free memory on the host, or fewer ranks on it")
            raise MegascaleError(f"{what}{f': {error.filename}' if error.filename else ''}", hint=hint) from None
        return Worker(rank, process, log)

    def start_in(
        self, standby: StandbyProcess, rank: int, *, listener: socket.socket | None, log: Path, env: Mapping[str, str]
    ) -> Worker:
        """Start a rank in a process in standby, otherwise as `start` does. Raises: OSError if the process has ended"""
        with open(log, "wb") as output:
            variables, descriptors = self._variables(rank, env), self._descriptors(listener)
            standby.give(self.arguments, variables, descriptors, output.fileno())
        return Worker(rank, standby.process, log)

    def _descriptors(self, listener: socket.socket | None) -> dict[str, tuple[str, int]]:
        """Return the variables whose values are a text and a descriptor."""
        store = {} if listener is None else {STORE_VARIABLE: (f"{self.store}:", listener.fileno())}
        return {DESCRIPTOR_VARIABLE: ("", self.secret), **store}

    def _variables(self, rank: int, more: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a rank, but for what `_descriptors` names."""
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(self.ranks.index(rank)),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(len(self.ranks)),
            STORE_VARIABLE: self.store,
            ERROR_FILE: str(self.logs / ERROR_FILE_NAME.format(rank)),
        }
        return {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **place, **self.env, **more}


def ending(workers: Sequence[Worker], grace_s: float, *, save: bool = False) -> Iterator[float]:
    """End workers, step by step: yield the seconds to wait before the next step, and return when all have ended, or
    KILL_S after they were killed. With `save` they finish their step and save before. SIGKILL after `grace_s`.
    """
    for worker in workers if grace_s else ():
        worker.stop(save=save)
    yield from _until_ended(workers, grace_s)
    for worker in workers:
        worker.signal(signal.SIGKILL)
    yield from _until_ended(workers, KILL_S)


def _until_ended(workers: Sequence[Worker], seconds: float) -> Iterator[float]:
    deadline = time.monotonic() + seconds
    while any(worker.ended() is None for worker in workers) and time.monotonic() < deadline:
        yield _POLL_S
