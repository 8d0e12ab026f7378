"""The start of a job: waits that name the missing ranks, names and ports that recover, and gloo's interface."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from megascale.comm import gloo_interface, rendezvous
from megascale.comm.agreement import check_agreement
from megascale.comm.store import JobStore
from megascale.core import wait_notice
from megascale.core.errors import ConfigError, LostPeerError
from megascale.core.network import LOOPBACK, listen
from megascale.core.rank import Rank
from megascale.core.run_folder import TOKEN_VARIABLE
from megascale.operate.channel.handshake import NotAPeerError
from megascale.operate.channel.secret import job_secret

SECRET = b"s" * 32


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A free port as MASTER_PORT of loopback, and short waits."""
    with listen(LOOPBACK) as listener:
        number = listener.getsockname()[1]
    for name in ("MEGASCALE_STORE", "TORCHELASTIC_USE_AGENT_STORE", "LOCAL_WORLD_SIZE", gloo_interface.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEGASCALE_JOB_SECRET", "s" * 32)
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", str(number))
    monkeypatch.setattr(wait_notice, "FIRST_S", 0.2)
    monkeypatch.setattr(rendezvous, "RETRY_S", 0.5)
    monkeypatch.setattr(rendezvous, "_PAUSE_S", 0.05)
    yield number


def join(rank: int, world: int, delay_s: float, timeout_s: float = 30) -> None:
    """Open the store as a rank and wait for the others, as a thread may: both ends poll in Python."""
    time.sleep(delay_s)
    here = Rank(rank, world, 0, "here", f"RANK={rank} and WORLD_SIZE={world}")
    store = rendezvous.open_store(here, SECRET, timedelta(seconds=timeout_s))
    check_agreement(store, here, {})


def notices(delays: list[float], err: io.StringIO) -> str:
    """What ranks print that come with these delays, without the seconds of their waits."""
    with contextlib.redirect_stderr(err):
        threads = [threading.Thread(target=join, args=(rank, len(delays), s)) for rank, s in enumerate(delays)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    return re.sub(r"waited \d+ s", "waited", err.getvalue())


@pytest.mark.parametrize("names", ["lo", "lo,", ""])
def test_interfaces_of_this_host_are_accepted(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gloo_interface.VARIABLE, names)
    assert not list(gloo_interface.interface_problems())


def test_an_interface_that_the_host_lacks_is_refused_before_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    from megascale.comm import init
    from megascale.device import detect_device

    monkeypatch.setenv(gloo_interface.VARIABLE, "lo,nope")
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME: this host has no interface 'nope'  -> one of "):
        init.init_distributed(Rank(0, 2, 0, "here"), detect_device(0))


def test_a_wait_names_the_missing_rank(port: int) -> None:
    said = notices([0, 3.0, 0], io.StringIO())
    where = f"at 127.0.0.1:{port}; it is a rank by RANK=0 and WORLD_SIZE=3\n"
    assert f"rank 0 of 3 on here: has waited for rank 1, {where}" in said
    assert "rank 2 of 3 on here: has waited for the ranks for which rank 0 waits" in said


def test_a_wait_for_the_store_names_rank_0_and_its_address(port: int) -> None:
    said = notices([1.0, 0], io.StringIO())
    assert f"rank 1 of 2 on here: has waited for rank 0, which opens the job's store at 127.0.0.1:{port}\n" in said


def test_a_wait_says_that_the_store_refused_processes(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with another secret leaves; rank 0 waits on, because whoever connects must not end a job."""

    def stranger() -> None:
        time.sleep(0.5)
        with contextlib.suppress(NotAPeerError):
            JobStore((LOOPBACK, port), b"x" * 32, timedelta(seconds=10))

    monkeypatch.setattr(wait_notice, "NEXT_S", 0.5)
    thread = threading.Thread(target=stranger)
    thread.start()
    said = notices([0, 4.0], io.StringIO())
    thread.join()
    refused = r"; the store has refused a process without the job's secret \d times, last at 127.0.0.1:\d+\n"
    assert re.search(rf"rank 0 of 2 on here: has waited for rank 1, at 127.*{refused}", said), said


def test_a_wait_ends_after_the_timeout(port: int) -> None:
    with pytest.raises(
        LostPeerError, match=r"timed out waiting \d+ s for rank 1 at the start .* same MASTER_ADDR"
    ) as e:
        join(0, 2, 0.0, timeout_s=0.4)
    assert e.value.peers == (1,)
    with pytest.raises(LostPeerError, match=r"timed out waiting 0 s for rank 0, which opens the job's store at 127"):
        os.environ["MASTER_PORT"] = "9"
        join(1, 2, 0.0, timeout_s=0.4)


def test_a_port_that_is_taken_for_a_moment_recovers(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    other = listen(LOOPBACK, port)
    threading.Timer(0.3, other.close).start()
    rendezvous._listen(LOOPBACK, port, Rank(0, 2, 0, "here")).close()
    assert f"rank 0 of 2 on here: has waited 0 s for port {port} of this host" in capsys.readouterr().err


def test_a_port_that_stays_taken_is_one_message(port: int) -> None:
    with listen(LOOPBACK, port), pytest.raises(ConfigError) as raised:
        rendezvous._listen(LOOPBACK, port, Rank(0, 2, 0, "here"))
    assert f"MASTER_PORT: rank 0 cannot listen at 127.0.0.1:{port}: Address already in use" in str(raised.value)
    assert len(str(raised.value).splitlines()) == 2


@pytest.mark.parametrize("failures", [3, 10**9])
def test_a_name_that_is_unknown_for_a_moment_recovers(
    failures: int, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        calls.append(host)
        if len(calls) <= failures:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return []

    monkeypatch.setenv("MASTER_ADDR", "first-host")
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    if failures == 3:
        assert rendezvous._master_address(Rank(0, 2, 0, "here")) == ("first-host", port) and len(calls) == 4
        return
    with pytest.raises(ConfigError, match="MASTER_ADDR: 'first-host': Temporary failure in name resolution"):
        rendezvous._master_address(Rank(0, 2, 0, "here"))


def test_one_host_needs_no_name(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torchrun gives the ranks the name of their host, which may have no address."""
    monkeypatch.setenv("MASTER_ADDR", "no-such-name.invalid")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert rendezvous._master_address(Rank(0, 2, 0, "here")) == (LOOPBACK, port)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MEGASCALE_STORE", "127.0.0.1:4000:0x"), ("MEGASCALE_STORE", "127.0.0.1:4000:999999")]
    + [("MEGASCALE_JOB_SECRET_FD", text) for text in ("", "-1", "three", "999999", "9" * 5000)],
)
def test_variables_of_our_launcher_are_checked(
    variable: str, value: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's shell may have got them from a rank."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=rf"environment  {variable}: .*megascale train sets it") as raised:
        rendezvous.open_store(Rank(0, 2, 0, "here"), job_secret(None), timedelta(seconds=1))
    assert len(str(raised.value).splitlines()) == 2


def test_a_rank_without_an_address_says_why_it_is_one(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: not set, but OMPI_COMM_WORLD_RANK=1 and .* make this process"):
        says = "OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=2"
        rendezvous._master_address(Rank(1, 2, 1, "here", says))


@pytest.mark.parametrize(
    ("host", "one_host", "chosen", "interface"),
    [
        (LOOPBACK, False, None, "lo"),
        ("no-such-name.invalid", False, None, "lo"),
        ("192.0.2.1", True, None, "lo"),
        (LOOPBACK, False, "eth7", "eth7"),
    ],
)
def test_the_interface_that_gloo_listens_on(
    host: str, one_host: bool, chosen: str | None, interface: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import HashStore

    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv(gloo_interface.VARIABLE, chosen or "")
    store = HashStore()
    gloo_interface.publish_address(store)
    gloo_interface.choose_gloo_interface(store, one_host=one_host)
    assert os.environ[gloo_interface.VARIABLE] == interface


def test_the_interface_of_an_address() -> None:
    assert gloo_interface._interface_of(LOOPBACK) == "lo"
    assert gloo_interface._interface_of("192.0.2.1") is None


def test_the_store_of_an_agent_is_on_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n7")  # an agent's own step
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    monkeypatch.delenv("MEGASCALE_STORE", raising=False)
    assert gloo_interface.first_host() == "n7"
    monkeypatch.setenv("MEGASCALE_STORE", "10.1.2.3:4000")
    assert gloo_interface.first_host() == "10.1.2.3"


def test_the_run_that_torchrun_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of a start tells the store of torchrun's agent, and that of a later start asks it."""
    agent = TCPStore(LOOPBACK, 0, is_master=True)
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv(TOKEN_VARIABLE, "7f3a")
    first = Rank(0, 2, 0, "localhost")
    rendezvous.remember_run(first)
    assert rendezvous.run_of_torchrun(first) == "", "without torchrun there is no such store"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert rendezvous.run_of_torchrun(first) == "", "no start has begun a run"
    rendezvous.remember_run(Rank(1, 2, 1, "localhost"))
    assert rendezvous.run_of_torchrun(first) == ""
    rendezvous.remember_run(first)
    assert rendezvous.run_of_torchrun(first) == "7f3a"
    agent.set(rendezvous.RUN_KEY, "\0../x")
    with pytest.raises(ConfigError, match="another process of this network wrote it"):
        rendezvous.run_of_torchrun(first)
