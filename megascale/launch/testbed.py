"""A cluster on one machine: network namespaces stand for hosts, joined by a switch over links of a set bandwidth."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, TypeVar

from megascale.launch.cores import Cores, remove
from megascale.launch.namespaces import PRIVILEGES, TestbedError, inside, kill_all_in, new_namespace, start_keeper

INTERFACE = "eth0"
"""The link's name inside a host."""

MOST_HOSTS = 250  # of one /24

_SUBNET = "10.77.0"  # of every testbed: their switches are not connected

# A link that was idle sends a burst at once, so it is short; yet a kernel that wakes up later than that loses the rest.
_BURST_S, _LEAST_BURST = 1e-3, 128 * 1024
# What may wait for the link; more is dropped. As small as one stream of TCP allows: waiting is delay.
_QUEUE_S, _LEAST_QUEUE = 20e-3, 512 * 1024

_ABSENT = {
    "netem": "ask for no delay, or use a kernel that can (CONFIG_NET_SCH_NETEM; modprobe sch_netem)",
    "tbf": "ask for no rate, or use a kernel that can (CONFIG_NET_SCH_TBF; modprobe sch_tbf)",
}

T = TypeVar("T")


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
        if rate is not None and not (1000 <= rate <= 1e12):
            raise TestbedError(f"a link of {rate:g} bit/s", mend="1 kbit/s to 1 Tbit/s, or no limit")
        if not (0 <= self.delay_s < math.inf):
            raise TestbedError(f"a link with a delay of {self.delay_s:g} s", mend="0 or more")


@dataclass(frozen=True)
class Host:
    """A host of a standing testbed. `namespace`: a path for ip(8) and nsenter(1)."""

    index: int
    namespace: str
    address: str
    interface: str = INTERFACE


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
            self._namespaces.extend(new_namespace() for _ in range(self._size + 1))
            if self._count is not None:
                for index in range(self._size):
                    self._cores.append(Cores(f"testbed-{os.getpid()}-{index}", self._count))
            self._keeper = start_keeper(self._namespaces, [cores.folder for cores in self._cores])
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
        return inside(self._namespaces[host], call)

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
        """Which host this is, of how many; the first one's address; the interface to use; and that others are not to be
        reached past it.
        """
        return {
            "HOST_INDEX": str(host),
            "HOSTS": str(len(self.hosts)),
            "FIRST_HOST": self.hosts[0].address,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "NCCL_IB_DISABLE": "1",
            "NCCL_HOSTID": f"testbed-{os.getpid()}-{host}",  # else it sees one host, by name and boot
        }

    def kill(self) -> None:
        """Kill everything that runs on the hosts."""
        kill_all_in(self._namespaces)
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

    done = inside(namespace, run)
    if done.returncode:
        reason = done.stderr.strip()
        failed = re.search(r"Command failed -:(\d+)", reason)
        line = lines[int(failed.group(1)) - 1] if failed else text
        if "qdisc kind is unknown" in reason:
            absent = next(kind for kind in _ABSENT if kind in line)
            raise TestbedError(f"this kernel has no {absent}: tc {line}", mend=_ABSENT[absent])
        mend = PRIVILEGES if "not permitted" in reason else ""
        raise TestbedError(f"{program} {line}: {reason.splitlines()[0] if reason else 'failed'}", mend=mend)


def _program(name: str) -> str:
    """Where a program of iproute2 is.

    Raises: TestbedError
    """
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if found is None:
        raise TestbedError(f"{name}: no such program", mend="install the package iproute2")
    return found
