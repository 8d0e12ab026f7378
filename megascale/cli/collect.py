"""`megascale collect`: the collector of a run's ranks on this host under torchrun or srun, which each launcher's first
rank starts; of several the first collects from all.

Its standard input is a pipe from that rank, and ends when the rank does. The process ends soon after the last rank.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megascale.config.run import RunConfig
from megascale.core.errors import Exit
from megascale.core.files import SHARED_MEMORY, lock_to_build
from megascale.core.process import module_command, process_exists
from megascale.operate.print_line import print_line
from megascale.operate.store.collector import POLL_S, Collector, CollectorThread
from megascale.record.log_files import find_logs, folder_key, remove_log
from megascale.record.log_reader import read_state
from megascale.record.rank_state import LogError

LAST_ROWS_S = 5.0
"""Seconds that a rank that ends in order waits for its collector, which a container may end with it."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    sub.add_argument("folder", type=Path, help="the run's folder, whose key is in the ranks' flight records")
    sub.add_argument("--metrics-address", default="127.0.0.1", help="observe.metrics_address")
    sub.add_argument("--metrics-port", type=int, default=0, help="observe.metrics_port")


@contextlib.contextmanager
def collector_process(config: RunConfig) -> Iterator[None]:
    """Collect from the ranks of a run on this host, in a process of its own, until they have ended. This process, which
    is one of them, trains in the `with` block.
    """
    words = module_command("megascale", "collect", str(config.folder))
    words += ["--metrics-address", config.observe.metrics_address, "--metrics-port", str(config.observe.metrics_port)]
    try:  # in a session of its own: torchrun ends the sessions of its ranks
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
    """Run the subcommand and return its exit status."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # for the ranks, whose last events are collected
    os.nice(10)
    first = os.getppid()
    mark = SHARED_MEMORY / f"megascale-{os.geteuid()}-{folder_key(options.folder):x}"
    try:
        while (lock := lock_to_build(mark)) is None:
            if _has_ended(first):
                return Exit.OK
    except OSError as error:
        print_line(f"WARNING: no event store, because {error.filename} cannot be opened: {error.strerror}")
        return Exit.UNCLASSIFIED
    with lock:
        _collect(options, first)
        Path(lock.name).unlink(missing_ok=True)
    return Exit.OK


def _collect(options: argparse.Namespace, first: int) -> None:
    """Collect until all ranks have ended. `first`: the process of the rank that started this one."""
    from megascale.operate.node.node_exporter import watching_host
    from megascale.operate.store.exporter import MetricsEndpoint

    paths: dict[int, Path] = {}
    pids: dict[int, int] = {}
    thread = CollectorThread(Collector(paths, print_line), print_line)
    name, host = options.folder.name, socket.gethostname()
    endpoint = MetricsEndpoint(options.metrics_address, options.metrics_port, name, options.folder, host, host)
    with watching_host(thread.collector, endpoint, print_line):
        while not _has_ended(first):
            _find_ranks(options.folder, paths, pids)
    while any(process_exists(pid) for pid in pids.values() if pid != first):
        time.sleep(POLL_S / 5)
    thread.finish()
    for path in paths.values():
        remove_log(path)


def _has_ended(parent: int) -> bool:
    """Wait a moment, and return True if standard input or the parent has ended."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], POLL_S)
    return bool(readable) or os.getppid() != parent


def _find_ranks(folder: Path, paths: dict[int, Path], pids: dict[int, int]) -> None:
    """Add the logs of the run's ranks that have begun on this host, and their processes."""
    key = folder_key(folder)
    for path in set(find_logs(folder.name)) - set(paths.values()):
        with contextlib.suppress(OSError, LogError):
            state = read_state(path, head_only=True)
            if state.folder == key and process_exists(state.pid):  # the pattern of "a" holds for "a-b"
                paths[state.rank], pids[state.rank] = path, state.pid
