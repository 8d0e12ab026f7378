"""A testbed: a cluster on one machine, of network namespaces as hosts, joined to a switch by links of a set bandwidth.

host 0 --link-- switch --link-- host 1
                  |
                 link
                  |
                host 2

Islands are several such clusters, whose switches are joined by slower links.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TypeVar

from lab.cpu_quota import CpuQuota, remove_cgroup
from lab.namespaces import (
    PRIVILEGES_HINT,
    TestbedError,
    call_in_namespace,
    kill_processes_in,
    new_namespace,
    start_reaper,
)
from megascale.operate.driver.scheduler.local import TESTBED_VARIABLE, NodeHost

INTERFACE = "eth0"
"""Name of the link inside a host."""

MAX_HOSTS = 250  # addresses of a /24

_SUBNET = "10.77.0"  # shared by all testbeds: their switches are not connected

# Seconds and least bytes of a burst after idle time: short, but a kernel that wakes up later loses bandwidth.
_BURST_S, _LEAST_BURST = 1e-3, 128 * 1024
# Seconds and least bytes of the queue; more is dropped. As short as a TCP stream allows, because queues add delay.
_QUEUE_S, _LEAST_QUEUE = 20e-3, 512 * 1024

_NOBODY = "02:00:00:00:00:00"  # the address of no device

_ABSENT = {
    "netem": "set no delay, or use a kernel with netem (CONFIG_NET_SCH_NETEM; modprobe sch_netem)",
    "tbf": "set no rate, or use a kernel with tbf (CONFIG_NET_SCH_TBF; modprobe sch_tbf)",
}

T = TypeVar("T")


@dataclass(frozen=True)
class HostLink:
    """The link between a host and the switch; both directions have the full bandwidth.

    `bits_per_second`: bandwidth for Ethernet frames, of which TCP carries about 95%; None: no limit. `delay_s`: added
    seconds of a packet from host to host.
    """

    bits_per_second: float | None = None
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        rate = self.bits_per_second
        if rate is not None and not (1000 <= rate <= 1e12):
            raise TestbedError(f"a link of {rate:g} bit/s", hint="set 1 kbit/s to 1 Tbit/s, or no limit")
        if not (0 <= self.delay_s < math.inf):
            raise TestbedError(f"a link with a delay of {self.delay_s:g} s", hint="set 0 s or more")


NO_LIMIT = HostLink()


@dataclass(frozen=True)
class Host:
    """A host of an open testbed. `namespace`: path of its network namespace, for ip(8) and nsenter(1)."""

    index: int
    namespace: str
    address: str
    interface: str = INTERFACE


class Testbed:
    """A context manager that opens `hosts` hosts on a switch, with their own loopback. `cores`: CPU quota of a host.
    `between`: the link of each further switch to the first, of `islands` switches, to which hosts belong in turn.

    The hosts cannot reach this machine's own network, which stays unchanged.

    Raises: TestbedError, and on entry CpuQuotaError
    """

    __test__ = False  # pytest takes a class of this name for tests

    def __init__(
        self, hosts: int, link: HostLink, cores: float | None = None, islands: int = 1, between: HostLink = NO_LIMIT
    ) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise TestbedError(f"a testbed of {hosts} hosts", hint=f"1 to {MAX_HOSTS}")
        self.hosts: tuple[Host, ...] = ()
        self.link = link
        self._islands, self._between = islands, between
        self._size = hosts
        self._cores_per_host = cores
        self._cpu_quotas: list[CpuQuota] = []  # by host; empty without quotas
        self._namespaces: list[int] = []  # file descriptors, by host; the switch's is the last
        self._processes: list[subprocess.Popen] = []
        self._reaper: subprocess.Popen | None = None

    def __enter__(self) -> Testbed:
        for name in ("ip", "tc"):
            _program(name)
        try:
            self._namespaces.extend(new_namespace() for _ in range(self._size + 1))
            if self._cores_per_host is not None:
                for index in range(self._size):
                    self._cpu_quotas.append(CpuQuota(f"testbed-{os.getpid()}-{index}", self._cores_per_host))
            self._reaper = start_reaper(self._namespaces, [quota.cgroup for quota in self._cpu_quotas])
            self.hosts = tuple(
                Host(index, f"/proc/{os.getpid()}/fd/{fd}", f"{_SUBNET}.{index + 1}")
                for index, fd in enumerate(self._namespaces[:-1])
            )
            self._connect()
            self.set_link(self.link)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def set_link(self, link: HostLink, host: int | None = None) -> None:
        """Change all links of the open testbed, or one host's, under running commands. `self.link` is that of all.

        Raises: TestbedError if the kernel does not support `link`; the links are then unchanged
        """
        switch, hosts = self._namespaces[-1], self.hosts if host is None else [self.hosts[host]]
        _batch("tc", switch, _queue("lo", link.bits_per_second, link.delay_s))  # a trial, on an unused device
        for each in hosts:
            _batch("tc", self._namespaces[each.index], _queue(INTERFACE, link.bits_per_second, link.delay_s))
        _batch("tc", switch, [line for each in hosts for line in _queue(_port(each), link.bits_per_second, 0.0)])
        self.link = link if host is None else self.link

    def bytes_between(self) -> int:
        """Count the bytes that the links between islands have carried since the testbed was opened."""
        text = call_in_namespace(self._namespaces[-1], lambda: Path("/proc/thread-self/net/dev").read_text())
        counts = (line.split() for line in text.splitlines() if line.lstrip().startswith("far"))
        return sum(int(fields[1]) + int(fields[9]) for fields in counts)  # received and sent

    def connect(self, host: int, *, up: bool) -> None:
        """Cut a host's link at the switch, or connect it again, under running commands."""
        _batch("ip", self._namespaces[-1], [f"link set {_port(self.hosts[host])} {'up' if up else 'down'}"])

    def reach(self, host: int, peers: Sequence[int], *, reaches: bool) -> None:
        """Lose all that a host sends to others, or deliver it again, under running commands."""
        places = [f"{self.hosts[peer].address} dev {INTERFACE}" for peer in peers]
        lost = [f"neigh replace {place} lladdr {_NOBODY} nud permanent" for place in places]
        _batch("ip", self._namespaces[host], [f"neigh del {place}" for place in places] if reaches else lost)

    def call_on_host(self, host: int, call: Callable[[], T]) -> T:
        """Call `call` on a host and return its result. Sockets and processes made by `call` stay on the host."""
        return call_in_namespace(self._namespaces[host], call)

    def start_command(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdin: int | IO | None = subprocess.DEVNULL,
        stdout: int | IO | None = None,
        stderr: int | IO | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, with this process's environment, `host_environment` and `env`. The command gets
        its own session; when the testbed closes, the command and its children are killed.

        Raises: TestbedError if there is no such command
        """
        environment = dict(os.environ) | self.host_environment(host) | dict(env or {})

        def start() -> subprocess.Popen[bytes]:
            words = self._cpu_quotas[host].wrap_command(command) if self._cpu_quotas else list(command)
            return subprocess.Popen(
                words, env=environment, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
            )

        try:
            process = self.call_on_host(host, start)
        except OSError as error:
            raise TestbedError(
                f"{command[0]}: {error.strerror}", hint="name a program that this user can run"
            ) from None
        self._processes.append(process)
        return process

    def wrap_command(self, host: int, command: Sequence[str]) -> list[str]:
        """Wrap a command so that the command and its children run on a host, wherever it is started."""
        words = self._cpu_quotas[host].wrap_command(command) if self._cpu_quotas else list(command)
        return [_program("nsenter", "util-linux"), f"--net={self.hosts[host].namespace}", *words]

    def host_environment(self, host: int) -> dict[str, str]:
        """Return the environment of a host: its index, the number of hosts, the first host's address, and settings that
        keep gloo and NCCL on the testbed's interface.
        """
        return {
            "HOST_INDEX": str(host),
            "HOSTS": str(len(self.hosts)),
            "FIRST_HOST": self.hosts[0].address,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "NCCL_IB_DISABLE": "1",
            "NCCL_HOSTID": f"testbed-{os.getpid()}-{host}",  # by host name and boot id NCCL would see a single host
        }

    def kill_processes(self) -> None:
        """Kill all processes on the hosts."""
        kill_processes_in(self._namespaces)
        for process in self._processes:
            process.kill()  # also a command that has left its host's namespace
            process.wait()
        self._processes.clear()

    def _connect(self) -> None:
        """Make the links from the hosts to the switch, and bring them up."""
        switch, between = list[str](), list[str]()
        for island in range(self._islands):
            switch += [f"link add switch{island} type bridge", f"link set switch{island} addrgenmode none up"]
        for island in range(1, self._islands):
            switch.append(f"link add far{island} type veth peer name near{island}")
            for end, to in (f"far{island}", island), (f"near{island}", 0):
                switch.append(f"link set {end} master switch{to} addrgenmode none up")
                between += _queue(end, self._between.bits_per_second, self._between.delay_s)
        for host in self.hosts:
            port = _port(host)
            switch += [
                f"link add {port} type veth peer name {INTERFACE} netns {host.namespace}",
                f"link set {port} master switch{host.index % self._islands} addrgenmode none up",
            ]
        _batch("ip", self._namespaces[-1], switch)
        _batch("tc", self._namespaces[-1], between)
        for host in self.hosts:
            lines = [
                "link set lo up",
                f"link set {INTERFACE} addrgenmode none up",  # no IPv6 address: a library might choose it
                f"address add {host.address}/24 dev {INTERFACE}",
            ]
            _batch("ip", self._namespaces[host.index], lines)

    def _close(self) -> None:
        """Kill all processes, release the namespaces and control groups, and wait for the end of the reaper."""
        try:
            self.kill_processes()
        finally:
            for fd in self._namespaces:
                os.close(fd)
            self._namespaces.clear()
            for quota in self._cpu_quotas:
                remove_cgroup(quota.cgroup)
            self._cpu_quotas.clear()
            self.hosts = ()
            if self._reaper is not None:
                self._reaper.communicate()
                self._reaper = None


def _port(host: Host) -> str:
    return f"port{host.index}"


def _queue(device: str, rate: float | None, delay: float) -> list[str]:
    """Return tc's commands that limit a device to `rate` bits per second and delay its packets by `delay` seconds."""
    root = f"qdisc replace dev {device} root"
    bytes_per_second = (rate or 0) / 8
    queued = max(_LEAST_QUEUE, bytes_per_second * _QUEUE_S)
    packets = 1000 + (bytes_per_second or 1.25e9) * delay / 1500  # in flight, of full size
    netem = f"netem delay {delay * 1e6:.0f}us limit {packets:.0f}"
    if rate is None:
        return [f"{root} handle 3: {netem}" if delay else f"{root} noqueue"]
    burst = max(_LEAST_BURST, bytes_per_second * _BURST_S)
    shaped = f"tbf rate {rate:.0f}bit burst {burst:.0f} limit {burst + queued:.0f}"
    if not delay:
        return [f"{root} handle 1: {shaped}"]  # not handle 2, whose inner netem the kernel would keep
    return [f"{root} handle 2: {shaped}", f"qdisc replace dev {device} parent 2:1 handle 20: {netem}"]


def _batch(program: str, namespace: int, lines: Sequence[str]) -> None:
    """Run a batch of commands of ip(8) or tc(8) in a namespace.

    Raises: TestbedError
    """
    command, text = [_program(program), "-batch", "-"], "\n".join(lines)

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    done = call_in_namespace(namespace, run)
    if done.returncode:
        reason = done.stderr.strip()
        failed = re.search(r"Command failed -:(\d+)", reason)
        line = lines[int(failed.group(1)) - 1] if failed else text
        if "qdisc kind is unknown" in reason:
            discipline = next(kind for kind in _ABSENT if kind in line)
            raise TestbedError(f"this kernel has no {discipline}: tc {line}", hint=_ABSENT[discipline])
        hint = PRIVILEGES_HINT if "not permitted" in reason else ""
        raise TestbedError(f"{program} {line}: {reason.splitlines()[0] if reason else 'failed'}", hint=hint)


def _program(name: str, package: str = "iproute2") -> str:
    """Return the path of a program of a package.

    Raises: TestbedError
    """
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if path is None:
        raise TestbedError(f"{name}: no such program", hint=f"install the package {package}")
    return path


def export_testbed(testbed: Testbed) -> dict[str, str]:
    """Return the environment in which `megascale launch` uses the hosts of an open testbed as nodes."""
    hosts = [
        NodeHost(host.address, testbed.wrap_command(host.index, ()), testbed.host_environment(host.index))
        for host in testbed.hosts
    ]
    return {TESTBED_VARIABLE: json.dumps([asdict(host) for host in hosts])}
