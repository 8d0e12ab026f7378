"""Commands on all hosts of a testbed at once: a plain one on each, or one job under torchrun."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megascale.launch.testbed import Host, Testbed

TIMEOUT = 600.0
"""Seconds that commands on the hosts may take if nothing else is said."""

GRACE = 30.0
"""Seconds in which the other hosts may end by themselves after one has failed."""

TIMED_OUT = 124
"""Exit status of a host whose command was killed because its time was up, as of timeout(1)."""

_PORT = "29500"  # free on hosts that are new
_POLL_S = 0.05


@dataclass(frozen=True)
class Ended:
    """How a command ended on a host: `status` is negative for a signal, TIMED_OUT if it had no more time. `seconds`
    after the start of all.
    """

    status: int
    out: str
    err: str
    seconds: float


Say = Callable[[Host, str, str], object]
"""Told of a line that a host printed: the host, "out" or "err", the line."""


class _Output:
    """What a command prints, to a file without a name: all of it, and each line once it is whole."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._say = say
        self._said = 0

    def read(self) -> None:
        """Say the lines that are new."""
        new = self._since(self._said)
        whole = new[: new.rfind(b"\n") + 1]
        self._said += len(whole)
        for line in whole.splitlines():
            self._say(line.decode(errors="replace"))

    def close(self) -> str:
        """All that was printed; says the rest."""
        self.read()
        text = self._since(0)
        self.file.close()
        if rest := text[self._said :]:
            self._say(rest.decode(errors="replace"))
        return text.decode(errors="replace")

    def _since(self, start: int) -> bytes:
        fd = self.file.fileno()
        return os.pread(fd, os.fstat(fd).st_size - start, start)  # leaves alone where the command writes


class _Running:
    """A command on a host. `status` is None until it has ended, after `seconds`."""

    def __init__(self, testbed: Testbed, host: Host, command: Sequence[str], env: Mapping[str, str], say: Say) -> None:
        self.out, self.err = (_Output(partial(say, host, name)) for name in ("out", "err"))
        self.process = testbed.start(host.index, command, env, stdout=self.out.file, stderr=self.err.file)
        self.status: int | None = None
        self.seconds = 0.0

    def look(self, seconds: float) -> None:
        """Say what is new, and note whether it has ended by now."""
        self.out.read()
        self.err.read()
        self.status, self.seconds = self.process.poll(), seconds

    def ended(self) -> Ended:
        """How it ended."""
        return Ended(self.status or 0, self.out.close(), self.err.close(), self.seconds)


def run(
    testbed: Testbed,
    command: Callable[[Host], Sequence[str]],
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    say: Say | None = None,
) -> list[Ended]:
    """Run a command on every host and return how it ended on each.

    When one fails, the others have GRACE seconds to end by themselves. After `timeout` seconds everything on the hosts
    is killed, and the status of those that were not done is TIMED_OUT. `say` is called with each line as it comes.
    Raises: TestbedError if there is no such command
    """
    start = time.monotonic()
    until = timeout
    told = say or (lambda host, name, line: None)
    running = [_Running(testbed, host, command(host), env or {}, told) for host in testbed.hosts]
    while left := [each for each in running if each.status is None]:
        time.sleep(_POLL_S)
        seconds = time.monotonic() - start
        for each in left:
            each.look(seconds)
            if each.status:
                until = min(until, seconds + GRACE)
        if seconds > until:
            late = [each for each in left if each.status is None]
            testbed.kill()
            for each in late:
                each.status = TIMED_OUT if until == timeout else -signal.SIGKILL
    return [each.ended() for each in running]


def torchrun(
    testbed: Testbed,
    ranks: int,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    say: Say | None = None,
) -> list[Ended]:
    """Run what torchrun runs (such as `-m megascale train CONFIG`) as `ranks` processes on every host: one job.

    The rest is as for `run`.
    """
    first = testbed.hosts[0].address
    job = ["--nnodes", str(len(testbed.hosts)), "--nproc-per-node", str(ranks)]
    meeting = ["--rdzv-backend", "static", "--master-addr", first, "--master-port", _PORT]
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # it warns that addresses have no names
    env = {name: os.environ.get(name, value) for name, value in defaults.items()} | dict(env or {})
    with tempfile.TemporaryDirectory() as logs:  # torchrun would leave a folder of its own
        launcher = [sys.executable, "-m", "torch.distributed.run", *job, *meeting, "--log-dir", logs]
        return run(testbed, lambda host: [*launcher, "--node-rank", str(host.index), *command], env, timeout, say)
