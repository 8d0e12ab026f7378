"""The ranks of one host, started and watched without torchrun.

torchrun, when a rank dies, prints the errors of those that lost their peer among that rank's own, and its workers go on
when it is killed itself. Here every rank dies with the launcher; when one fails, the others are ended and the error
shown is that of the rank that failed first, by its number and host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megascale.core.errors import Exit
from megascale.core.process import die_with, handling_stops
from megascale.core.rank import STORE
from megascale.launch.failure import ERROR_FILE, Failure, first_cause

GRACE = 10.0
"""Seconds that ranks have to end after one has failed, before they are killed."""

SETTLE = 1.0
"""Seconds in which other ranks may report their own errors, so that the first cause is found among them."""


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen
    log: Path | None


def run(arguments: Sequence[str], world: int, logs: Path, dumps: Path | None = None) -> int:
    """Run `python -m megascale ARGUMENTS` as `world` ranks on this host and return the exit status of the job.

    Rank 0 shares this terminal; the others write to `logs`/rank-N.log. A signal that asks to stop is passed on once, so
    that the ranks finish their step and save; a second one ends them. `dumps`: the flight recorder's folder.
    """
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob("rank-*.*"):
        old.unlink()
    workers: list[_Worker] = []
    forward = _Forward(workers)
    with handling_stops(forward.pass_on):
        with _listening() as listener:
            for rank in range(world):
                if not forward.asked:
                    workers.append(_start(arguments, rank, world, listener, logs))
        if len(workers) < world:
            _end(workers)
            return _stopped(forward)
        return _watch(workers, forward, logs, dumps)


@contextlib.contextmanager
def _listening() -> Iterator[socket.socket]:
    """A socket on a free loopback port for the store of rank 0."""
    listener = socket.socket()
    try:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener
    finally:
        listener.close()


def _start(arguments: Sequence[str], rank: int, world: int, listener: socket.socket, logs: Path) -> _Worker:
    address = ":".join(map(str, listener.getsockname()))
    fd = listener.fileno()
    env = dict(
        os.environ,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
    )
    env[STORE] = f"{address}:{fd}" if rank == 0 else address
    env[ERROR_FILE] = str(logs / f"rank-{rank}.error.json")
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    log = logs / f"rank-{rank}.log" if rank else None
    parent = os.getpid()
    with open(log, "wb") if log else contextlib.nullcontext() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "megascale", *arguments],
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT if log else None,
            pass_fds=[fd] if rank == 0 else [],
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on as a request to stop
            preexec_fn=lambda: die_with(parent),  # noqa: PLW1509  the launcher has no threads
        )
    return _Worker(rank, process, log)


class _Forward:
    """Passes on what asks to stop: the first time as a request, the second as the end. `asked` counts."""

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self._workers = workers
        self.asked = 0

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGHUP:  # shell and kernel may each send one
            return
        _signal(self._workers, signal.SIGKILL if self.asked else signal.SIGTERM)
        self.asked += 1


def _watch(workers: Sequence[_Worker], forward: _Forward, logs: Path, dumps: Path | None) -> int:
    """Wait for all ranks, or for the first that fails; then end the others and say what happened."""
    good = (None, Exit.OK, Exit.STOPPED)
    while all((code := worker.process.poll()) in good for worker in workers):
        if code is not None and all(worker.process.poll() is not None for worker in workers):
            stopped = any(worker.process.returncode == Exit.STOPPED for worker in workers)
            return Exit.STOPPED if stopped else Exit.OK
        time.sleep(0.05)
    time.sleep(SETTLE)
    died = {w.rank: -w.process.returncode for w in workers if (w.process.poll() or 0) < 0}  # by a signal, not ours
    _end(workers)
    if forward.asked and set(died.values()) <= {signal.SIGTERM, signal.SIGKILL} and died:
        return _stopped(forward)
    failure = first_cause(logs, died, {worker.rank: worker.process.returncode for worker in workers}, dumps)
    print(_report(failure, workers), file=sys.stderr)
    return failure.exit_status


def _stopped(forward: _Forward) -> int:
    when = "before the first step" if forward.asked == 1 else "at once, without saving"
    print(f"megascale: stopped {when}", file=sys.stderr)
    return Exit.STOPPED


def _report(failure: Failure, workers: Sequence[_Worker]) -> str:
    world = len(workers)
    log = workers[failure.rank].log
    told = log is None and not failure.unexplained  # by the rank itself, on this terminal
    lines = [
        f"megascale: rank {failure.rank} of {world} on {failure.host} failed" + ("" if told else f": {failure.what}")
    ]
    if log is not None:
        if failure.unexplained:
            lines += [f"  | {line}" for line in log.read_text(errors="replace").splitlines()[-20:]]
        lines.append(f"its output: {log}")
    if world > 1:
        lines.append(f"the other {world - 1} rank{'s were' if world > 2 else ' was'} ended")
    return "\n".join(lines)


def _end(workers: Sequence[_Worker]) -> None:
    """End the ranks that still run: SIGTERM twice (the second does not wait for the step), then SIGKILL."""
    for _ in range(2):
        _signal(workers, signal.SIGTERM)
        time.sleep(0.1)
    deadline = time.monotonic() + GRACE
    while any(w.process.poll() is None for w in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(workers, signal.SIGKILL)
    for worker in workers:
        worker.process.wait()


def _signal(workers: Sequence[_Worker], number: int) -> None:
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.send_signal(number)
