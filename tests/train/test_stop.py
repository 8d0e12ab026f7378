"""Stop requests: a rank that waits in C++ hears signals, before training and in training."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import pytest

from megascale.core.errors import Exit
from megascale.core.process import STOP_ORDER
from megascale.core.rank import STORE_VARIABLE, Rank
from megascale.record.log_files import ATTEMPT_VARIABLE
from tests.worlds import run_world


def wait_in_cpp() -> None:
    """Wait for a store that no rank opens; Python runs no handler meanwhile."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    TCPStore("127.0.0.1", 9, 2, False, timedelta(seconds=100))


def wait_in_python() -> None:
    time.sleep(100)


WAITS = {"in C++": wait_in_cpp, "in Python": wait_in_python}
ENDS: dict[tuple[bool, tuple[int, ...]], int] = {  # in training or before; signals; exit status
    (False, (signal.SIGTERM,)): Exit.STOPPED,
    (False, (signal.SIGINT,)): Exit.INTERRUPTED,
    (True, (signal.SIGTERM,)): Exit.STOPPED,
    (True, (signal.SIGINT,)): Exit.STOPPED,
    (True, (signal.SIGHUP, signal.SIGTERM)): Exit.STOPPED,
}
Waiting = tuple[str, tuple[bool, tuple[int, ...]]]


def ended_by(rank: Rank) -> dict[Waiting, int]:
    """The exit statuses of processes that wait and get signals, the last of them until they end; -1 if one never does.
    All of them wait at once.
    """
    pids = {(wait, end): waiting_process(WAITS[wait], end[0]) for wait in WAITS for end in ENDS}
    ends: dict[Waiting, int] = {}
    deadline, sent = time.monotonic() + 60, 0
    time.sleep(0.5)
    while len(ends) < len(pids) and time.monotonic() < deadline:
        for waiting in pids.keys() - ends.keys():
            numbers = waiting[1][1]
            ended, status = os.waitpid(pids[waiting], os.WNOHANG)
            if ended:
                ends[waiting] = os.waitstatus_to_exitcode(status)
            else:
                os.kill(pids[waiting], numbers[min(sent, len(numbers) - 1)])
        sent += 1
        time.sleep(0.3)
    for waiting in pids.keys() - ends.keys():
        os.kill(pids[waiting], signal.SIGKILL)
        os.waitpid(pids[waiting], 0)
        ends[waiting] = -1
    return ends


def waiting_process(wait: Callable[[], None], in_training: bool) -> int:
    """Fork a process that waits; return its id."""
    from megascale.train.stop import StopRequest

    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    stop = StopRequest().install_handlers(lambda message, status: None)
    if in_training:
        with stop.deferred():
            wait()
    wait()
    os._exit(0)


@pytest.fixture(scope="module")
def ends() -> dict[Waiting, int]:
    return run_world(1, ended_by)[0]


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("end", ENDS)
def test_a_waiting_rank_hears_signals(wait: str, end: tuple[bool, tuple[int, ...]], ends: dict[Waiting, int]) -> None:
    assert ends[wait, end] == ENDS[end]


def until(condition: Callable[[], bool]) -> bool:
    """Wait until a condition is true, and return True; False after a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def deliveries(rank: Rank, numbers: list[int]) -> bool:
    """Whether signals to a rank without a launcher, in training, are one request."""
    from megascale.train.stop import StopRequest

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    stop = StopRequest().install_handlers()
    with stop.deferred():
        for number in numbers:
            os.kill(os.getpid(), number)  # it is read within REQUEST_S, or together with the next
        return until(lambda: stop.requested)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_several_deliveries_of_a_signal_in_training_are_one_request(number: int) -> None:
    """As under torchrun, which forwards a signal that the rank has got itself."""
    assert run_world(1, deliveries, [number, number]) == [True]


def of_a_launcher(
    rank: Rank, wait_s: float, numbers: list[int], env: dict[str, str], in_training: bool, orders: int = 0
) -> list:
    """Send signals to a rank that has a launcher, and `orders` once it has heeded one. Returns its exit status, or -1
    if it does not end, and what it holds for a request: whether there is one, and the signal to it alone.
    """
    from megascale.train import stop as module

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.environ |= {STORE_VARIABLE: "127.0.0.1:1", **env}
        module.ORDER_WAIT_S = wait_s
        stop = module.StopRequest().install_handlers(lambda message, status: None)
        with stop.deferred() if in_training else contextlib.nullcontext():
            for number in numbers:
                os.kill(os.getpid(), number)
            until(lambda: stop.requested)
            for _ in range(orders):
                os.kill(os.getpid(), STOP_ORDER)
                until(lambda: not stop.unordered)
            os.write(writer, repr((stop.requested, int(stop.unordered))).encode())
            time.sleep(60 if numbers.count(STOP_ORDER) + orders > 1 else 0)
            os._exit(0)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    return [os.waitstatus_to_exitcode(status), os.read(reader, 100).decode()]


AGENT = {ATTEMPT_VARIABLE: "0"}
TERM = signal.SIGTERM


@pytest.mark.parametrize("env", [{}, AGENT], ids=["launcher", "agent"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_is_the_launchers_one_request(number: int, env: dict[str, str]) -> None:
    got = run_world(1, of_a_launcher, 600.0, [number, STOP_ORDER, number], env, True)
    assert got == [[0, "(True, 0)"]]


def test_a_second_order_ends_a_rank_at_once() -> None:
    assert run_world(1, of_a_launcher, 600.0, [STOP_ORDER, STOP_ORDER], {}, True)[0][0] == Exit.STOPPED
    assert run_world(1, of_a_launcher, 600.0, [STOP_ORDER], AGENT, False) == [[Exit.STOPPED, ""]]


@pytest.mark.parametrize(
    ("env", "in_training", "status", "holds"),
    [({}, True, 0, "(True, 15)"), ({}, False, -TERM, ""), (AGENT, True, -TERM, ""), (AGENT, False, -TERM, "")],
    ids=["launcher", "launcher at the start", "agent", "agent at the start"],
)
def test_a_signal_to_one_rank_alone(env: dict[str, str], in_training: bool, status: int, holds: str) -> None:
    """Under an agent, which starts it again, it ends the rank, and never the job."""
    assert run_world(1, of_a_launcher, 0.2, [TERM], env, in_training) == [[status, holds]]


def test_the_first_order_after_a_signal_to_one_rank_alone_lets_it_save() -> None:
    """The launcher counts its own requests: the second order kills."""
    assert run_world(1, of_a_launcher, 0.2, [TERM], {}, True, 1) == [[0, "(True, 0)"]]
    assert run_world(1, of_a_launcher, 0.2, [TERM], {}, True, 2)[0][0] == Exit.STOPPED


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
