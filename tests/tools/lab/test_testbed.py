"""The testbed: links of the requested bandwidth, and a complete removal after any end."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab import LAB, cpu_quota, hosts, testbed
from lab.commands import testbed as tool
from lab.cpu_quota import CpuQuotaError
from lab.testbed import Host, HostLink
from megascale.core.errors import Exit
from tests.jobs import curve, finish, heed_signals, job_config, lives
from tests.runs import GPT

TOOL = [sys.executable, LAB, "testbed"]
MBIT = 1e6
FOREVER = ["sh", "-c", "echo ready; setsid sleep 1000 & sleep 1000"]  # and a grandchild that leaves the group


def missing() -> str:
    """Return why a testbed cannot run here; an empty text if it can."""
    absent = [name for name in ("ip", "tc") if shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin") is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: iproute2)"
    if subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL, check=False).returncode:
        return "a network namespace needs root with CAP_SYS_ADMIN"
    return ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def net(link: Path) -> str | None:
    """The network namespace that a link in /proc leads to, or None."""
    try:
        place = str(link.readlink())
    except OSError:
        return None
    return place if place.startswith("net:[") else None


def held_by(pid: int | str) -> set[str]:
    """The network namespaces that a process holds open."""
    try:
        return {name for fd in Path(f"/proc/{pid}/fd").iterdir() if (name := net(fd))}
    except OSError:
        return set()


def processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdecimal()]


def inside(namespaces: set[str]) -> list[int]:
    """The processes that run in namespaces."""
    return [int(pid) for pid in processes() if net(Path(f"/proc/{pid}/ns/net")) in namespaces]


def holders(namespaces: set[str]) -> list[int]:
    """The processes that keep namespaces alive: running inside, or with an open descriptor."""
    return sorted({*inside(namespaces), *(int(pid) for pid in processes() if held_by(pid) & namespaces)})


def until(question: Callable[[], object], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not question():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def named() -> str:
    """The output of `ip netns list`, and the interfaces of this machine."""
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return f"{shown.stdout}{socket.if_nameindex()}"


def transfer(bed: testbed.Testbed, sender: int, receiver: int, count: int) -> float:
    """Send `count` bytes by TCP from host to host, and return the seconds."""
    server = bed.call_on_host(receiver, lambda: socket.create_server((bed.hosts[receiver].address, 0)))
    out = bed.call_on_host(sender, lambda: socket.create_connection(server.getsockname()[:2], 10))
    into, _ = server.accept()

    def send() -> None:
        with out:
            out.sendall(bytes(count))

    with server, into:
        start = time.monotonic()
        thread = threading.Thread(target=send)
        thread.start()
        left = count
        while left and (data := into.recv(1 << 20)):
            left -= len(data)
        seconds = time.monotonic() - start
        thread.join()
    assert left == 0
    return seconds


def reached(bed: testbed.Testbed, rate: float, *pairs: tuple[int, int]) -> list[float]:
    """The shares of `rate` that parallel streams between hosts reach, by the bytes of a second. The best of a few tries
    counts, because this machine may be busy.
    """
    best = [0.0] * len(pairs)
    for _ in range(5):
        with ThreadPoolExecutor() as threads:
            seconds = threads.map(lambda pair: transfer(bed, *pair, int(rate / 8)), pairs)
        best = [max(part, 1 / each) for part, each in zip(best, seconds, strict=True)]
        if min(best) >= 0.8:
            break
    return best


@pytest.fixture(scope="module")
def bed() -> Iterator[testbed.Testbed]:
    with testbed.Testbed(3, HostLink(100 * MBIT)) as standing:
        yield standing


def test_a_link_has_its_rate_in_both_directions(bed: testbed.Testbed) -> None:
    bed.set_link(HostLink(100 * MBIT))
    for pair in ((0, 1), (1, 0)):
        assert 0.8 <= reached(bed, 100 * MBIT, pair)[0] <= 1.05
    assert all(0.8 <= part <= 1.05 for part in reached(bed, 100 * MBIT, (0, 1), (1, 0))), "not full duplex"


@pytest.mark.parametrize("pairs", [((0, 2), (1, 2)), ((2, 0), (2, 1))], ids=["receives", "sends"])
def test_two_streams_share_the_link_of_one_host(pairs: tuple[tuple[int, int], ...], bed: testbed.Testbed) -> None:
    bed.set_link(HostLink(100 * MBIT))
    start = time.monotonic()
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda pair: transfer(bed, *pair, int(50 * MBIT / 8)), pairs))
    assert time.monotonic() - start >= 1 / 1.05


def test_a_standing_link_is_changed(bed: testbed.Testbed) -> None:
    bed.set_link(HostLink(40 * MBIT))
    assert 0.8 <= reached(bed, 40 * MBIT, (0, 1))[0] <= 1.05
    bed.set_link(HostLink(None))
    assert reached(bed, 300 * MBIT, (0, 1))[0] > 1.05, "a link without a rate is limited"
    bed.set_link(HostLink(20 * MBIT))
    assert 0.8 <= reached(bed, 20 * MBIT, (1, 2))[0] <= 1.05


@pytest.mark.slow
def test_one_hosts_link_is_cut_and_slowed(bed: testbed.Testbed) -> None:
    """Both ends, each way: the whole link, what one host sends to another, and the link's rate."""

    def hears(host: int, peer: int) -> bool:
        address = bed.hosts[peer].address
        with bed.call_on_host(peer, lambda: socket.create_server((address, 0))) as listener:
            try:
                bed.call_on_host(host, lambda: socket.create_connection(listener.getsockname(), 2.0)).close()
            except OSError:
                return False
            return True

    assert hears(0, 1)
    bed.connect(0, up=False)
    assert not hears(0, 1) and not hears(1, 0)
    bed.connect(0, up=True)
    bed.reach(0, [1], reaches=False)
    assert not hears(0, 1) and not hears(1, 0), "no answer comes"
    if len(bed.hosts) > 2:
        assert hears(0, 2) and hears(2, 1)
    bed.reach(0, [1], reaches=True)
    assert hears(0, 1)
    bed.set_link(HostLink(50 * MBIT), 1)
    assert bed.link.bits_per_second != 50 * MBIT
    shown = ["tc", "qdisc", "show", "dev", "eth0"]
    queues = [bed.call_on_host(host, lambda: subprocess.check_output(shown, text=True)) for host in (0, 1)]
    assert ["50Mbit" in queue for queue in queues] == [False, True]
    bed.set_link(bed.link)


def test_a_delay_is_there_or_refused(bed: testbed.Testbed) -> None:
    """Many kernels lack netem."""
    bed.set_link(HostLink(100 * MBIT))
    try:
        bed.set_link(HostLink(100 * MBIT, delay_s=0.05))
    except testbed.TestbedError as error:
        assert str(error).startswith("this kernel has no netem: tc qdisc ")
        assert "set no delay" in error.hint and error.exit_status == Exit.CONFIG
        assert bed.link == HostLink(100 * MBIT)
        assert 0.8 <= reached(bed, 100 * MBIT, (0, 1))[0] <= 1.05, "what was refused changed the link"
    else:
        start = time.monotonic()
        transfer(bed, 0, 1, 1)
        assert time.monotonic() - start >= 0.1  # there and back
        bed.set_link(HostLink(100 * MBIT))
        assert 0.8 <= reached(bed, 100 * MBIT, (0, 1))[0] <= 1.05


def test_islands_meet_over_their_own_link() -> None:
    between = HostLink(50 * MBIT)
    with testbed.Testbed(3, HostLink(), islands=2, between=between) as bed:
        transfer(bed, 0, 2, 1_000_000)
        assert bed.bytes_between() < 10_000, "hosts 0 and 2 are on one switch"
        transfer(bed, 0, 1, 1_000_000)
        assert 1_000_000 < bed.bytes_between() < 1_200_000


def test_hosts_are_apart(bed: testbed.Testbed) -> None:
    """A host has its own loopback and an interface, and reaches the other hosts only."""
    assert [host.address for host in bed.hosts] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    for host in bed.hosts:
        names = bed.call_on_host(host.index, lambda: [name for _, name in socket.if_nameindex()])
        assert {"lo", host.interface} <= set(names)
    with bed.call_on_host(0, lambda: socket.create_server(("127.0.0.1", 4000))):
        bed.call_on_host(0, lambda: socket.create_connection(("127.0.0.1", 4000), 5)).close()
        with pytest.raises(ConnectionRefusedError):
            bed.call_on_host(1, lambda: socket.create_connection(("127.0.0.1", 4000), 5))
    with pytest.raises(OSError, match="unreachable"):
        bed.call_on_host(0, lambda: socket.create_connection(("192.0.2.1", 80), 5))


def test_two_testbeds_do_not_meet() -> None:
    with testbed.Testbed(2, HostLink()) as one, testbed.Testbed(2, HostLink()) as other:
        assert one.hosts[0].address == other.hosts[0].address
        with one.call_on_host(0, lambda: socket.create_server((one.hosts[0].address, 4000))):
            one.call_on_host(1, lambda: socket.create_connection((one.hosts[0].address, 4000), 5)).close()
            with pytest.raises(ConnectionRefusedError):
                other.call_on_host(1, lambda: socket.create_connection((one.hosts[0].address, 4000), 5))


def test_a_command_on_every_host(bed: testbed.Testbed) -> None:
    said: list[tuple[int, str, str]] = []

    def say(host: Host, name: str, line: str) -> None:
        said.append((host.index, name, line))

    script = 'echo "$HOST_INDEX of $HOSTS"; echo "$WORD" >&2; printf end; exit "$HOST_INDEX"'
    ends = hosts.run_on_hosts(bed, lambda host: ["sh", "-c", script], {"WORD": "given"}, timeout=60, on_line=say)
    assert [end.status for end in ends] == [0, 1, 2]
    assert [end.stdout for end in ends] == [f"{index} of 3\nend" for index in range(3)]
    assert [end.stderr for end in ends] == ["given\n"] * 3
    assert sorted(said) == sorted(
        line for i in range(3) for line in ((i, "out", f"{i} of 3"), (i, "out", "end"), (i, "err", "given"))
    )


def test_after_the_time_all_is_killed(bed: testbed.Testbed) -> None:
    ends = hosts.run_on_hosts(bed, lambda host: ["true"] if host.index == 1 else FOREVER, timeout=1)
    assert [end.status for end in ends] == [124, 0, 124]
    assert ends[0].stdout == "ready\n"
    assert not inside({net(Path(host.namespace)) or "" for host in bed.hosts})
    assert hosts.run_on_hosts(bed, lambda host: ["true"], timeout=60)[0].status == 0, "the hosts go on standing"


def test_hosts_end_when_one_has_failed(bed: testbed.Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "SHUTDOWN_TIMEOUT_S", 0.3)
    ends = hosts.run_on_hosts(bed, lambda host: ["sh", "-c", "exit 7"] if host.index == 1 else FOREVER, timeout=60)
    assert [end.status for end in ends] == [-signal.SIGKILL, 7, -signal.SIGKILL]
    assert tool.status(ends) == 7


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_of_a_testbed(fails: bool) -> None:
    before = named()
    seen: set[str] = set()
    try:
        with testbed.Testbed(2, HostLink(100 * MBIT)) as bed:
            seen = {net(Path(host.namespace)) or "" for host in bed.hosts}
            process = bed.start_command(1, FOREVER, stdout=subprocess.PIPE)
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            until(lambda: len(inside(seen)) == 3, "shell and two sleepers")
            assert held_by("self") >= seen and named() == before
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    assert len(seen) == 2 and holders(seen) == []
    assert process.returncode == -signal.SIGKILL
    assert named() == before


class Standing:
    """The tool with an endless command, seen from outside. `namespaces`: of its hosts and its switch."""

    def __init__(self) -> None:
        command = [*TOOL, "--hosts", "2", "--rate", "100mbit", "--exec", "--", *FOREVER]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals
        )
        try:
            until(lambda: len(self.running()) == 6, "two hosts with a shell and two sleepers each")
        except BaseException:
            self.process.kill()
            raise
        self.namespaces = held_by(self.process.pid)
        self.commands = self.running()
        (self.reaper,) = set(holders(self.namespaces)) - {self.process.pid, *self.commands}

    def running(self) -> list[int]:
        return inside(held_by(self.process.pid))

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal; status and errors."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=30)
        return self.process.returncode, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_when_a_signal_ends_the_tool(number: int) -> None:
    before = named()
    standing = Standing()
    assert len(standing.namespaces) == 3 and named() == before
    status, err = standing.end(number)
    assert status == (-number if number == signal.SIGKILL else 128 + number)
    assert err == ""
    until(lambda: not holders(standing.namespaces), "something of the testbed is left")
    pids = [*standing.commands, standing.reaper]
    until(lambda: not any(map(lives, pids)), "it lives")  # who ends leaves its namespaces first
    assert named() == before
    again = subprocess.run([*TOOL, "--exec", "--", "true"], check=False, timeout=60)
    assert again.returncode == 0


def test_the_reaper_ends_what_kill_9_left() -> None:
    standing = Standing()
    os.kill(standing.reaper, signal.SIGKILL)
    standing.end(signal.SIGKILL)
    time.sleep(1)
    assert sorted(inside(standing.namespaces)) == sorted(standing.commands)
    for pid in standing.commands:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not holders(standing.namespaces), "nothing held them but the commands")


def test_a_signal_to_all_that_carries_the_tools_name_leaves_nothing() -> None:
    """A signal as of `pkill -f testbed`: the reaper blocks it until its work is done."""
    standing = Standing()
    os.kill(standing.reaper, signal.SIGTERM)
    standing.end(signal.SIGKILL)
    until(lambda: not holders(standing.namespaces), "the reaper left before its time")


@pytest.mark.parametrize(
    ("dropped", "message"),
    [("-all", "no network namespace can be made: Operation not permitted"), ("-net_admin", "Operation not permitted")],
)
def test_without_privileges_that_is_said(dropped: str, message: str) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv not installed (Debian: util-linux)")
    command = ["setpriv", f"--bounding-set={dropped}", "--inh-caps=-all", *TOOL, "--exec", "--", "true"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == Exit.CONFIG
    assert message in result.stderr and "-> run as root" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--exec", "--", "no-such-program"], "no-such-program: No such file or directory  -> "),
        (["--hosts", "251", "--exec", "--", "true"], "a testbed of 251 hosts  -> 1 to 250"),
        (["--rate", "1bit", "--exec", "--", "true"], "a link of 1 bit/s  -> set 1 kbit/s to 1 Tbit/s"),
        (["--rate", "1000tbit", "--exec", "--", "true"], "a link of 1e+15 bit/s  -> set 1 kbit/s to 1 Tbit/s"),
        (["--rate", "1mb", "--exec", "--", "true"], "'1mb' is not a rate"),
        (["--delay", "1", "--exec", "--", "true"], "'1' is not a time"),
        ([], "the following arguments are required: WORD"),
    ],
)
def test_mistakes_of_the_command_line(arguments: list[str], message: str) -> None:
    result = subprocess.run([*TOOL, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == Exit.CONFIG
    assert message in result.stderr and "Traceback" not in result.stderr


def test_without_iproute2_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed.shutil, "which", lambda name, path: None if name == "tc" else f"/sbin/{name}")
    with pytest.raises(testbed.TestbedError, match="tc: no such program  -> install the package iproute2") as error:
        testbed.Testbed(2, HostLink()).__enter__()
    assert error.value.exit_status == Exit.CONFIG


@pytest.mark.parametrize(
    ("text", "bits"),
    [("500mbit", 5e8), ("1gbit", 1e9), ("1.5Gbit", 1.5e9), ("9600", 9600), ("8kibit", 8192), ("10mbps", 8e7)],
)
def test_rates_in_the_words_of_tc(text: str, bits: float, bed: testbed.Testbed) -> None:
    assert tool.rate(text) == bits

    def ask() -> str:
        line = f"tc qdisc replace dev lo root tbf rate {text} burst 100kb limit 100kb && tc qdisc show dev lo"
        return subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout

    shown = re.findall(r"rate (\S+)", bed.call_on_host(0, ask))[0]
    assert tool.rate(shown) == pytest.approx(bits, rel=0.001)


def test_times_in_the_words_of_tc() -> None:
    assert [tool.duration(text) for text in ("1ms", "100us", "0.5s")] == pytest.approx([1e-3, 1e-4, 0.5])
    for text in ("1", "ms", "1.2.3s", "-1ms", "nan"):
        with pytest.raises(argparse.ArgumentTypeError):
            tool.duration(text)


@pytest.mark.slow
def test_a_job_on_two_hosts(tmp_path: Path, bed: testbed.Testbed) -> None:
    """The losses equal a single host's, and the gradients went over the links."""
    settings = {"parallel__dp": 3, "train__steps": 2, "train__precision": "fp32", "optimizer__warmup_steps": 1}
    settings |= {"batch__global": 6}
    expected = curve(finish(job_config(tmp_path / "one", GPT, **settings)))
    config = job_config(tmp_path / "three", GPT, **settings)
    bed.set_link(HostLink(500 * MBIT))
    before = sent(bed)
    (tmp_path / "tmp").mkdir()
    env = {"TMPDIR": str(tmp_path / "tmp")}
    ends = hosts.run_torchrun(bed, 1, ["-m", "megascale", "train", str(config)], env, timeout=120)
    assert [end.status for end in ends] == [0, 0, 0], ends
    assert not list((tmp_path / "tmp").glob("torchelastic*"))
    assert "step 2/2" in ends[0].stdout and "step 2/2" not in ends[1].stdout
    records = map(json.loads, (config.parent / "runs" / "test" / "metrics.jsonl").read_text().splitlines())
    for got, wanted in zip(curve([record for record in records if "loss" in record]), expected, strict=True):
        assert got == pytest.approx(wanted)
    gradients = 2 * 54_000 * 4
    assert all(after - start > gradients for start, after in zip(before, sent(bed), strict=True))


def sent(bed: testbed.Testbed) -> list[int]:
    """Bytes that each host has sent over its link."""

    def read() -> int:
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))

    return [bed.call_on_host(host.index, read) for host in bed.hosts]


@pytest.mark.slow
def test_the_tool_starts_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import os, sys; print(*(os.environ.get(name) for name in sys.argv[1:]))")
    shown = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"]
    command = [*TOOL, "--hosts", "2", "--ranks", "2", "--rate", "1gbit", "--timeout", "120", "--", str(script), *shown]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=150)
    assert result.returncode == 0, result.stderr
    expected = [f"[host {rank // 2}] {rank} 4 10.77.0.1 eth0 1" for rank in range(4)]
    assert sorted(result.stdout.splitlines()) == expected


SPIN = """
import time
wall, used = time.monotonic(), time.process_time()
while time.monotonic() < wall + 1:
    pass
print(time.process_time() - used)
"""


def test_a_host_has_no_more_than_its_cores() -> None:
    try:
        bed = testbed.Testbed(2, HostLink(), cores=0.25)
        with bed:
            folders = [quota.cgroup for quota in bed._cpu_quotas]
            ends = hosts.run_on_hosts(bed, lambda host: [sys.executable, "-c", SPIN], timeout=60)
    except CpuQuotaError as error:  # this machine does not allow quotas
        assert error.exit_status == Exit.CONFIG and "control groups" in str(error)
        return
    assert [end.status for end in ends] == [0, 0]
    assert all(0 < float(end.stdout) < 0.35 for end in ends), "at most a quarter of a second"
    assert folders and not any(folder.exists() for folder in folders)


def test_a_group_that_is_gone_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", None)
    cpu_quota.remove_cgroup(tmp_path / "gone")


@pytest.mark.parametrize("count", [0.01, 0.0, -1.0, float("nan"), float("inf")])
def test_a_part_of_a_core_that_cannot_be(count: float) -> None:
    with pytest.raises(CpuQuotaError, match=r"0\.2 or more"), testbed.Testbed(1, HostLink(), cores=count):
        pass
