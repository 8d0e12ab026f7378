"""The local launcher: starts and watches the ranks of a job on a single host, without torchrun.

When a rank dies, torchrun prints its error among the errors of ranks that lost their peer; when torchrun is killed, its
workers continue. Here all ranks die with the launcher. When a rank fails, the other ranks are ended and the root cause
is shown, with its rank and host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from megascale.core.errors import ConfigError, Exit, MegascaleError, Problem
from megascale.core.network import LOOPBACK, has_loopback, listen
from megascale.core.process import STOP_ORDER, StopRequests, handling_stops
from megascale.core.rank import format_ranks
from megascale.operate.channel.secret import new_secret, secret_descriptor
from megascale.operate.node.failure import Failure, ProcessEnd, has_left_in_order, read_records, root_cause
from megascale.operate.node.live_ranks import live_file
from megascale.operate.node.workers import Launch, Worker, ending, remove_old_logs
from megascale.operate.store.collector import Collector, collecting
from megascale.record.live_file import LIVE_FILE
from megascale.record.log_files import FLIGHT_RECORD_VARIABLE, log_files, process_states, read_states
from megascale.record.rank_state import UNORDERED_SIGNAL, RankState

SHUTDOWN_TIMEOUT_S = 10.0
"""Seconds that ranks have to end after a failure, before they are killed."""

ROOT_CAUSE_WINDOW_S = 1.0
"""Seconds after a failure in which other ranks may write their error files, for the search of the root cause."""


_POLL_S = 0.05
_STOPPED = (Exit.STOPPED, Exit.INTERRUPTED, *(-n for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, STOP_ORDER)))
"""Statuses of ranks that a stop ended before the first step, by an order or by the signal of which they got one too."""


FindHung = Callable[[Mapping[int, RankState], Mapping[int, str]], tuple[int, str] | None]
"""Function (flight records, states of the processes that run): return the rank that hangs and the reason, or None."""


def run_local_ranks(
    arguments: Sequence[str],
    world: int,
    logs: Path,
    dump_folder: Path | None = None,
    find_hung: FindHung | None = None,
    beside: Callable[[Collector], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> int:
    """Run `python -m megascale ARGUMENTS` as `world` ranks on this host and return the exit status of the job.

    Rank 0 shares this terminal; the other ranks write to `logs`/rank-N.log. At the first request to stop the ranks are
    ordered to finish their step and save; the second kills them. `dump_folder`: dumps of torch's flight recorder.
    `find_hung`: asked for the rank that others wait for in vain, when they end by their timeout. `beside`: what runs
    beside the ranks and their collector.

    Raises: ConfigError on a host without a loopback interface; MegascaleError if a rank cannot be started.
    """
    if not has_loopback():
        what = "the loopback interface is down, and the ranks need it"
        raise ConfigError([Problem(f"host {socket.gethostname()}", "", what, "ip link set lo up")])
    remove_old_logs(logs)
    workers: list[Worker] = []
    forwarder = _SignalForwarder(workers)
    with handling_stops(forwarder.forward), log_files(logs.parent.name, range(world)) as records:
        with listen(LOOPBACK) as listener, secret_descriptor(new_secret()) as secret:
            store = ":".join(map(str, listener.getsockname()))
            env = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
            launch = Launch(arguments, world, range(world), store, secret, logs, env)
            for rank in range(world):
                if not forwarder.requests.count:
                    try:
                        workers.append(_start(launch, rank, listener, records[rank]))
                    except MegascaleError:
                        _end(workers)
                        raise
        if forwarder.requests.count:  # a signal has missed the ranks that were started after it
            _end(workers)
            return _report_stop(forwarder, logs)
        # threads start after the last fork
        with (
            live_file(logs.parent / LIVE_FILE, workers, records, _print) as live,
            collecting(records, _print) as collector,
            beside(collector),
        ):
            failure = _watch(workers, forwarder, logs, dump_folder)
            if isinstance(failure, int):
                live.status = failure
                _name_unordered(records)
                return failure
            if failure.peer_was_lost and find_hung is not None:
                failure = _explain_hang(failure, workers, records, find_hung)
            _end(workers)
            live.status = failure.exit_status
            _print(_report(failure, workers))
        return failure.exit_status


def _start(launch: Launch, rank: int, listener: socket.socket, record: Path) -> Worker:
    """Start a rank. Rank 0 has this process's terminal, and the socket of the job's store."""
    env = {FLIGHT_RECORD_VARIABLE: str(record)}
    if rank == 0:
        return launch.start(rank, listener=listener, env=env)
    return launch.start(rank, log=launch.logs / f"rank-{rank}.log", env=env)


def _explain_hang(
    failure: Failure, workers: Sequence[Worker], records: Mapping[int, Path], find_hung: FindHung
) -> Failure:
    """Return the failure of the rank that hangs, by the flight records; `failure` if they do not tell."""
    found = read_states(records)
    running = {worker.rank for worker in workers if worker.ended() is None}
    states = process_states({rank: record for rank, record in found.items() if rank in running})
    hung = find_hung(found, states)
    if hung is None:
        return failure
    return replace(failure, rank=hung[0], host=os.uname().nodename, message=hung[1], unexplained=True)


class _SignalForwarder:
    """Passes requests to stop on to the ranks: the first as an order to save and leave, the second as SIGKILL."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self.requests = StopRequests()

    def explains(self, end: ProcessEnd) -> bool:
        """Return True for the end of a rank that a request has ended: before the first step, or at once."""
        killed = (-signal.SIGKILL,) if self.requests.count > 1 else ()
        return self.requests.count > 0 and end.status in (*_STOPPED, *killed)

    def forward(self, number: int, frame: FrameType | None) -> None:
        if not self.requests.add(number, time.monotonic()):
            return
        for worker in self._workers:
            if self.requests.count > 1:
                worker.signal(signal.SIGKILL)
            else:
                worker.stop(save=True)


def _watch(
    workers: Sequence[Worker], forwarder: _SignalForwarder, logs: Path, dump_folder: Path | None
) -> int | Failure:
    """Wait for the end of all ranks, or for a failure. Returns the job's exit status, or the root cause while other
    ranks still run.

    A rank that ends without having left the job in order is a failure, whatever its status: the others would wait for
    it, or fail next.
    """
    ends: dict[int, ProcessEnd] = {}
    in_order: set[int] = set()
    while all(rank in in_order or forwarder.explains(end) for rank, end in ends.items()):
        if len(ends) == len(workers):
            return max(end.status for end in ends.values()) if in_order else _report_stop(forwarder, logs)
        time.sleep(_POLL_S)
        in_order.update(rank for rank in _add_new_ends(workers, ends) if has_left_in_order(logs, rank, ends[rank]))
    until = time.monotonic() + ROOT_CAUSE_WINDOW_S
    while time.monotonic() < until and len(ends) < len(workers):
        time.sleep(_POLL_S)
        _add_new_ends(workers, ends)
    failure = root_cause(logs, ends, dump_folder)  # before signals make the others write how they ended
    if failure.rank in ends and forwarder.explains(ends[failure.rank]):  # the others have lost a rank that was stopped
        _end(workers)
        return _report_stop(forwarder, logs)
    return failure


def _add_new_ends(workers: Sequence[Worker], ends: dict[int, ProcessEnd]) -> list[int]:
    """Add the ranks that have ended since the last call to `ends`, and return them."""
    new = {worker.rank: end for worker in workers if worker.rank not in ends and (end := worker.ended())}
    ends.update(new)
    return list(new)


def _report_stop(forwarder: _SignalForwarder, logs: Path) -> int:
    """Report a stop at which no rank has left in order, and return the job's status."""
    if forwarder.requests.count > 1:
        _print("megascale: stopped at once, without saving")
        return Exit.STOPPED
    told = (record["what"] for record in read_records(logs).values() if record["exit_status"] in _STOPPED)
    _print(f"megascale: {next(told, 'stopped before the first step')}")
    return Exit.INTERRUPTED if forwarder.requests.first == signal.SIGINT else Exit.STOPPED


def _name_unordered(records: Mapping[int, Path]) -> None:
    """Name the ranks that have stopped the job, each at a signal that this launcher did not get."""
    for rank, record in read_states(records).items():
        if number := record.totals.get(UNORDERED_SIGNAL):
            name = signal.Signals(int(number)).name
            _print(f"megascale: the job has stopped because rank {rank} received {name}, which nobody of the job sent")


def _print(text: str) -> None:
    """Print on stderr, if the terminal is still there."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _report(failure: Failure, workers: Sequence[Worker]) -> str:
    world = len(workers)
    log = workers[failure.rank].log
    shown = log is None and not failure.unexplained  # rank 0 has printed its error on this terminal
    message = "" if shown else f": {failure.message}"
    killed = f"; {format_ranks(failure.killed)}: killed by SIGKILL" if failure.killed else ""
    lines = [f"megascale: rank {failure.rank} of {world} on {failure.host} failed{message}{killed}"]
    if log is not None:
        if failure.unexplained:
            with contextlib.suppress(OSError):  # the run's folder may be lost
                text = log.read_text(encoding=sys.stderr.encoding, errors="replace")  # the launcher's is a rank's too
                lines += [f"  | {line}" for line in text.splitlines()[-20:]]
        lines.append(f"its output: {log}")
    if others := world - 1 - len(failure.killed):
        lines.append(f"the other {others} rank{'s were' if others > 1 else ' was'} ended")
    return "\n".join(lines)


def _end(workers: Sequence[Worker]) -> None:
    for pause in ending(workers, SHUTDOWN_TIMEOUT_S):
        time.sleep(pause)
