"""Workers: ranks that die with their parent, and that end in bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megascale.core.errors import MegascaleError
from megascale.core.process import STOP_ORDER
from megascale.operate.channel.secret import new_secret, secret_descriptor
from megascale.operate.node import workers
from megascale.operate.node.workers import Launch, Worker, ending
from tests.jobs import lives, wait_until_gone

DEAF = (
    "import signal, time; signal.signal(signal.SIGRTMIN + 3, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
PLAIN = "import time; print('up', flush=True); time.sleep(600)"


def worker(code: str) -> Worker:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return Worker(0, process, None)


def end(*some: Worker, grace_s: float, save: bool = False) -> float:
    start = time.monotonic()
    for pause in ending(some, grace_s, save=save):
        time.sleep(pause)
    return time.monotonic() - start


def test_a_worker_that_heeds_an_order_is_not_waited_for() -> None:
    plain = worker(PLAIN)
    assert end(plain, grace_s=60) < 30
    ended = plain.ended()
    assert ended is not None and ended.status == -STOP_ORDER


@pytest.mark.parametrize("stop", [False, True], ids=["deaf", "stopped"])
def test_a_worker_that_does_not_is_killed_after_the_grace(stop: bool) -> None:
    deaf = worker(DEAF)
    if stop:
        deaf.signal(signal.SIGSTOP)
    assert end(deaf, grace_s=0.3) >= 0.3
    ended = deaf.ended()
    assert ended is not None and ended.status == -signal.SIGKILL


def test_the_end_of_a_worker_that_even_sigkill_does_not_end_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of one in uninterruptible sleep."""
    monkeypatch.setattr(workers, "KILL_S", 0.2)
    plain = worker(PLAIN)
    with monkeypatch.context() as deaf:
        deaf.setattr(os, "kill", lambda pid, number: None)
        assert end(plain, grace_s=0) < 30
    assert plain.ended() is None
    os.kill(plain.process.pid, signal.SIGKILL)
    plain.process.wait()


def test_a_saving_worker_gets_one_order_however_often_it_is_told() -> None:
    code = (
        "import os, signal, sys, time; pipe, end = os.pipe(); os.set_blocking(end, False); signal.set_wakeup_fd(end)\n"
    )
    code += "signal.signal(signal.SIGRTMIN + 3, lambda *_: None); print('up', flush=True)\n"
    code += "n = len(os.read(pipe, 9)); time.sleep(1); os.set_blocking(pipe, False)\n"
    code += "try: n += len(os.read(pipe, 9))\n"
    code += "except BlockingIOError: pass\n"
    code += "sys.exit(10 + n)"
    for save, orders in ((True, 1), (False, 2)):
        saving = worker(code)
        saving.stop(save=save)
        end(saving, grace_s=60, save=save)
        ended = saving.ended()
        assert ended is not None and ended.status == 10 + orders


WITH_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600 if sys.argv[1:] else 0)
"""


def with_child(*arguments: str) -> tuple[Worker, int]:
    """A worker that ends at once, without arguments, and the process id of its child, which does not."""
    command = [sys.executable, "-c", WITH_CHILD, *arguments]
    rank = Worker(0, subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True), None)
    assert rank.process.stdout is not None
    child = int(rank.process.stdout.readline())
    rank.process.stdout.close()
    return rank, child


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "in order"])
def test_the_children_of_a_worker_end_with_it(killed: bool) -> None:
    """A compiler or a helper of the user's code, whichever way the rank ends; it may hold memory of the device."""
    rank, child = with_child(*(["stay"] if killed else []))
    if killed:
        assert rank.ended() is None and lives(child)
        rank.signal(signal.SIGKILL)
    os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
    ended = rank.ended()
    assert ended is not None and ended.status == (-signal.SIGKILL if killed else 0)
    wait_until_gone([child])


def test_the_children_of_a_worker_that_ends_as_it_gets_a_signal_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, child = with_child()
    os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
    with monkeypatch.context() as before:
        before.setattr(rank, "ended", lambda: None)
        rank.signal(signal.SIGTERM)
    ended = rank.ended()
    assert ended is not None and ended.status == 0
    wait_until_gone([child])


def test_a_stop_signal_may_come_while_the_end_of_a_worker_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler asks for the worker's end again, in the midst of `Popen`'s own, and must not wait for it."""
    plain = worker("print('up', flush=True)")
    os.waitid(os.P_PID, plain.process.pid, os.WEXITED | os.WNOWAIT)
    take, asked = plain.process._handle_exitstatus, list[int]()

    def handle_stop_and_take(status: int) -> None:
        asked.append(status)
        plain.signal(STOP_ORDER)
        take(status)

    monkeypatch.setattr(plain.process, "_handle_exitstatus", handle_stop_and_take)
    main = threading.Thread(target=plain.ended, daemon=True)  # a deadlock must not hang the test
    main.start()
    main.join(60)
    assert asked == [0] and plain.end is not None and plain.end.status == 0


PARENT = """
import sys, time
from pathlib import Path
from megascale.operate.channel.secret import new_secret, secret_descriptor
from megascale.operate.node.workers import Launch
with secret_descriptor(new_secret()) as secret:
    launch = Launch(["--version"], 1, [0], "127.0.0.1:1", secret, Path(sys.argv[1]))
    print(launch.start(0, log=Path(sys.argv[1]) / "log").process.pid, flush=True)
time.sleep(600)
"""


def test_a_worker_dies_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os, time\nif 'RANK' in os.environ: time.sleep(600)")
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])]))
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert lives(pid)
        parent.kill()
    deadline = time.monotonic() + 10
    while lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    with secret_descriptor(new_secret()) as secret:
        launch = Launch(["--version"], 4, [2, 3], "127.0.0.1:1", secret, tmp_path)
        with pytest.raises(MegascaleError, match=r"rank 3 of 4 cannot be started on .*: No such file"):
            launch.start(3, log=tmp_path / "absent" / "log")
