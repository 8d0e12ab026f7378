"""A cluster on one machine: network namespaces stand for hosts, joined by a switch over links of a set bandwidth.

The namespaces have no names: they are held by open files, so the kernel removes them, with all that is in them, when
their holders have ended. A keeper, a process in a session of its own, outlives whatever ends this one and kills what
still runs on the hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, TypeVar

from megascale.core.errors import Exit, MegascaleError
from megascale.launch.cores import Cores, remove

TIMEOUT = 600.0
"""Seconds that commands on the hosts may take if nothing else is said."""

GRACE = 30.0
"""Seconds in which the other hosts may end by themselves after one has failed."""

TIMED_OUT = 124
"""Exit status of a host whose command was killed because its time was up, as of timeout(1)."""

INTERFACE = "eth0"
"""The link's name inside a host."""

MOST_HOSTS = 250  # of one /24

_SUBNET = "10.77.0"  # of every testbed: their switches are not connected
_PORT = "29500"  # free on hosts that are new
_POLL_S = 0.05
_DEATH_S = 10.0  # in which a process that is killed ends
_CLONE_NEWNET = 0x40000000  # of unshare(2), setns(2)

# A link that was idle sends a burst at once, so it is short; yet a kernel that wakes up later than that loses the rest.
_BURST_S, _LEAST_BURST = 1e-3, 128 * 1024
# What may wait for the link; more is dropped. As small as one stream of TCP allows: waiting is delay.
_QUEUE_S, _LEAST_QUEUE = 20e-3, 512 * 1024

_PRIVILEGES = "run as root; in a container, in one that has CAP_NET_ADMIN and CAP_SYS_ADMIN (--privileged)"
_ABSENT = {
    "netem": "ask for no delay, or use a kernel that can (CONFIG_NET_SCH_NETEM; modprobe sch_netem)",
    "tbf": "ask for no rate, or use a kernel that can (CONFIG_NET_SCH_TBF; modprobe sch_tbf)",
}

T = TypeVar("T")


class TestbedError(MegascaleError):
    """A cluster that this machine cannot have, or a command that cannot be run on it."""

    exit_status = Exit.CONFIG


@dataclass(frozen=True)
class Link:
    """What joins a host to the switch, alike in both directions, each on its own.

    `bits_per_second`: of Ethernet frames, so TCP carries some 95% of it; None: nothing limits it. `delay_s`: seconds
    that a packet takes longer from one host to another.
    """

    bits_per_second: float | None = None
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        rate = self.bits_per_second
        if rate is not None and not (1000 <= rate < math.inf):
            raise TestbedError(f"a link of {rate:g} bit/s", mend="1000 bit/s or more, or None for no limit")
        if not (0 <= self.delay_s < math.inf):
            raise TestbedError(f"a link with a delay of {self.delay_s:g} s", mend="0 or more")


@dataclass(frozen=True)
class Host:
    """A host of a standing testbed. `namespace`: a path for ip(8) and nsenter(1)."""

    index: int
    namespace: str
    address: str
    interface: str = INTERFACE


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


class Testbed:
    """`hosts` hosts, each with its own loopback, on one switch: they stand while the context is open. With `cores` what
    runs on a host has no more than their time, even if the machine has more.

    Nothing of this machine's own network is touched or reached. Raises on entry: TestbedError, CoresError
    """

    __test__ = False  # pytest takes a class of this name for tests

    def __init__(self, hosts: int, link: Link, cores: float | None = None) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise TestbedError(f"a testbed of {hosts} hosts", mend=f"1 to {MOST_HOSTS}")
        self.hosts: tuple[Host, ...] = ()
        self.link = link
        self._size = hosts
        self._count = cores
        self._cores: list[Cores] = []  # of each host, where they are bounded
        self._namespaces: list[int] = []  # file descriptors: of each host, and last of the switch
        self._processes: list[subprocess.Popen] = []
        self._keeper: subprocess.Popen | None = None

    def __enter__(self) -> Testbed:
        for name in ("ip", "tc"):
            _program(name)
        try:
            self._namespaces.extend(_new_namespace() for _ in range(self._size + 1))
            if self._count is not None:
                for index in range(self._size):
                    self._cores.append(Cores(f"testbed-{os.getpid()}-{index}", self._count))
            self._keeper = _start_keeper(self._namespaces, [cores.folder for cores in self._cores])
            self.hosts = tuple(
                Host(index, f"/proc/{os.getpid()}/fd/{fd}", f"{_SUBNET}.{index + 1}")
                for index, fd in enumerate(self._namespaces[:-1])
            )
            self._connect()
            self.shape(self.link)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def shape(self, link: Link) -> None:
        """Change every link of the standing testbed; what runs goes on.

        Raises: TestbedError if the kernel cannot; the links are then as they were
        """
        switch = self._namespaces[-1]
        _batch("tc", switch, _queue("lo", link.bits_per_second, link.delay_s))  # a trial: nothing is sent there
        for host in self.hosts:
            _batch("tc", self._namespaces[host.index], _queue(INTERFACE, link.bits_per_second, link.delay_s))
        _batch("tc", switch, [line for host in self.hosts for line in _queue(_port(host), link.bits_per_second, 0.0)])
        self.link = link

    def inside(self, host: int, call: Callable[[], T]) -> T:
        """What `call` returns on a host. Sockets that it makes stay there, processes too."""
        return _inside(self._namespaces[host], call)

    def start(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdin: int | IO | None = subprocess.DEVNULL,
        stdout: int | IO | None = None,
        stderr: int | IO | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, with our environment, what the host's libraries need to know, and `env`. It leads
        a process group of its own, and is killed with all that it started when the testbed is closed.

        Raises: TestbedError if there is no such command
        """
        everything = dict(os.environ) | self.environment(host) | dict(env or {})

        def start() -> subprocess.Popen[bytes]:
            words = self._cores[host].bounded(command) if self._cores else list(command)
            return subprocess.Popen(
                words, env=everything, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
            )

        try:
            process = self.inside(host, start)
        except OSError as error:
            raise TestbedError(
                f"{command[0]}: {error.strerror}", mend="name a program that this user can run"
            ) from None
        self._processes.append(process)
        return process

    def environment(self, host: int) -> dict[str, str]:
        """Which host this is, of how many; the interface to use; and that others are not to be reached past it."""
        return {
            "HOST_INDEX": str(host),
            "HOSTS": str(len(self.hosts)),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "NCCL_IB_DISABLE": "1",
            "NCCL_HOSTID": f"testbed-{os.getpid()}-{host}",  # else it sees one host, by name and boot
        }

    def kill(self) -> None:
        """Kill everything that runs on the hosts."""
        _kill_all_in(self._namespaces)
        for process in self._processes:
            process.kill()  # one that has left its host, too
            process.wait()
        self._processes.clear()

    def _connect(self) -> None:
        """Lay the links from the hosts to the switch, and bring all up."""
        switch = ["link add switch type bridge", "link set switch addrgenmode none up"]
        for host in self.hosts:
            port = _port(host)
            switch += [
                f"link add {port} type veth peer name {INTERFACE} netns {host.namespace}",
                f"link set {port} master switch addrgenmode none up",
            ]
        _batch("ip", self._namespaces[-1], switch)
        for host in self.hosts:
            lines = [
                "link set lo up",
                f"link set {INTERFACE} addrgenmode none up",  # no address of IPv6 for a library to choose
                f"address add {host.address}/24 dev {INTERFACE}",
            ]
            _batch("ip", self._namespaces[host.index], lines)

    def _close(self) -> None:
        """End what runs, let go of the namespaces, and see the keeper off."""
        try:
            self.kill()
        finally:
            for fd in self._namespaces:
                os.close(fd)
            self._namespaces.clear()
            for cores in self._cores:
                remove(cores.folder)
            self._cores.clear()
            self.hosts = ()
            if self._keeper is not None:
                self._keeper.communicate()
                self._keeper = None


def _port(host: Host) -> str:
    return f"port{host.index}"


def _queue(device: str, rate: float | None, delay: float) -> list[str]:
    """Lines for tc: what a device sends is held to `rate` bits a second and comes `delay` seconds later."""
    root = f"qdisc replace dev {device} root"
    bytes_per_second = (rate or 0) / 8
    waiting = max(_LEAST_QUEUE, bytes_per_second * _QUEUE_S)
    packets = 1000 + (bytes_per_second or 1.25e9) * delay / 1500  # under way, of full size
    netem = f"netem delay {delay * 1e6:.0f}us limit {packets:.0f}"
    if rate is None:
        return [f"{root} handle 3: {netem}" if delay else f"{root} noqueue"]
    burst = max(_LEAST_BURST, bytes_per_second * _BURST_S)
    shaped = f"tbf rate {rate:.0f}bit burst {burst:.0f} limit {burst + waiting:.0f}"
    if not delay:
        return [f"{root} handle 1: {shaped}"]  # under another number than below: a delay within does not stay
    return [f"{root} handle 2: {shaped}", f"qdisc replace dev {device} parent 2:1 handle 20: {netem}"]


def _batch(program: str, namespace: int, lines: Sequence[str]) -> None:
    """Have ip(8) or tc(8) do what some lines say in a namespace.

    Raises: TestbedError
    """
    command, text = [_program(program), "-batch", "-"], "\n".join(lines)

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    done = _inside(namespace, run)
    if done.returncode:
        reason = done.stderr.strip()
        failed = re.search(r"Command failed -:(\d+)", reason)
        line = lines[int(failed.group(1)) - 1] if failed else text
        if "qdisc kind is unknown" in reason:
            absent = next(kind for kind in _ABSENT if kind in line)
            raise TestbedError(f"this kernel has no {absent}: tc {line}", mend=_ABSENT[absent])
        mend = _PRIVILEGES if "not permitted" in reason else ""
        raise TestbedError(f"{program} {line}: {reason.splitlines()[0] if reason else 'failed'}", mend=mend)


def _program(name: str) -> str:
    """Where a program of iproute2 is.

    Raises: TestbedError
    """
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if found is None:
        raise TestbedError(f"{name}: no such program", mend="install the package iproute2")
    return found


def _new_namespace() -> int:
    """A file descriptor that holds a network namespace of its own.

    Raises: TestbedError
    """

    def make() -> int:
        _system_call("unshare", _CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    try:
        return _in_thread(make)
    except OSError as error:
        raise TestbedError(f"no network namespace can be made: {error.strerror}", mend=_PRIVILEGES) from None


def _inside(namespace: int, call: Callable[[], T]) -> T:
    """What `call` returns in a namespace."""

    def enter() -> T:
        _system_call("setns", namespace, _CLONE_NEWNET)
        return call()

    return _in_thread(enter)


def _in_thread(call: Callable[[], T]) -> T:
    """What `call` returns in a thread of its own: threads have namespaces, and this one keeps its."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def _system_call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _start_keeper(namespaces: Sequence[int], groups: Sequence[Path]) -> subprocess.Popen:
    """A process that kills what runs in the namespaces when this one ends: then its standard input does, too. It
    removes the control groups that are left.
    """

    def start() -> subprocess.Popen:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))  # of this thread
        return subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, (*namespaces, *groups))],
            stdin=subprocess.PIPE,
            pass_fds=namespaces,  # it holds them: the number by which a namespace is known is soon used again
            start_new_session=True,
        )

    return _in_thread(start)


def _kill_all_in(namespaces: Sequence[int]) -> None:
    """Kill all processes in some namespaces, and those that they start meanwhile.

    Raises: TestbedError if some do not end
    """
    inodes = {os.fstat(fd).st_ino for fd in namespaces}
    deadline = time.monotonic() + _DEATH_S
    while found := [
        pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _namespace_of(pid) in inodes
    ]:
        if time.monotonic() > deadline:
            raise TestbedError(f"processes {found} do not end", mend="see what they wait for in /proc/PID/stack")
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _namespace_of(pid: int) -> int | None:
    """The inode of a process's network namespace; None if it has ended."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return None


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
    launcher = [sys.executable, "-m", "torch.distributed.run", *job, *meeting]
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # it warns that addresses have no names
    env = {name: os.environ.get(name, value) for name, value in defaults.items()} | dict(env or {})
    return run(testbed, lambda host: [*launcher, "--node-rank", str(host.index), *command], env, timeout, say)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    _kill_all_in([int(word) for word in sys.argv[1:] if word.isdecimal()])
    for word in sys.argv[1:]:
        if not word.isdecimal():
            remove(Path(word))
