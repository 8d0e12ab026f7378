"""Stop requests: a rank that waits in C++ hears signals, before training and in training."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from megascale.core.errors import Exit
from megascale.core.rank import Rank
from tests.worlds import run_world


def ended_by(rank: Rank, wait: Callable[[], None], in_training: bool, numbers: list[int]) -> int:
    """The exit status of a process that waits and gets signals, a quarter of a second apart; -1 if it does not end."""
    from megascale.train.stop import StopRequest

    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        stop = StopRequest().install_handlers(lambda message, status: None)
        if in_training:
            with stop.deferred():
                wait()
        wait()
        os._exit(0)
    for number in numbers:
        time.sleep(0.5)
        os.kill(pid, number)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


def wait_in_cpp() -> None:
    """Wait for a store that no rank opens; Python runs no handler meanwhile."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    TCPStore("127.0.0.1", 9, 2, False, timedelta(seconds=100))


def wait_in_python() -> None:
    time.sleep(100)


@pytest.mark.parametrize("wait", [wait_in_cpp, wait_in_python])
@pytest.mark.parametrize(
    ("in_training", "numbers", "status"),
    [
        (False, [signal.SIGTERM], Exit.STOPPED),
        (False, [signal.SIGINT], Exit.INTERRUPTED),
        (True, [signal.SIGTERM, signal.SIGTERM], Exit.STOPPED),
        (True, [signal.SIGINT, signal.SIGINT], Exit.STOPPED),
        (True, [signal.SIGHUP, signal.SIGHUP, signal.SIGTERM], Exit.STOPPED),
    ],
)
def test_a_waiting_rank_hears_signals(
    wait: Callable[[], None], in_training: bool, numbers: list[int], status: int
) -> None:
    assert run_world(1, ended_by, wait, in_training, numbers) == [status]


def first_signal(rank: Rank) -> tuple[bool, bool]:
    from megascale.train.stop import StopRequest

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    stop = StopRequest().install_handlers()
    with stop.deferred():
        before = stop.requested
        for _ in range(2):  # shell and kernel may both send it
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.2)
        return before, stop.requested


def test_the_first_signal_in_training_is_a_request() -> None:
    assert run_world(1, first_signal) == [(False, True)]


def signal_after_an_error(rank: Rank) -> bool:
    from megascale.train.stop import StopRequest

    stop = StopRequest().install_handlers()
    with pytest.raises(ValueError, match="of a step"), stop.deferred():
        raise ValueError("of a step")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    return stop.requested


def test_a_signal_does_not_end_a_rank_that_reports_an_error() -> None:
    assert run_world(1, signal_after_an_error) == [True]
