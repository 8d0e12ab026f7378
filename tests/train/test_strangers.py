"""Another user of the host against a running job: nothing is got, and the job trains on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import Exit
from megascale.core.files import write_text
from megascale.operate.channel.secret import job_secret, secret_file
from tests.jobs import Job, job_config
from tests.runs import GPT
from tests.train.stranger import attack_as, crowd_as

NOBODY = 65534
RUN_HERE = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
pytestmark = [pytest.mark.slow, RUN_HERE]

LOOPBACK = "0100007F"
LISTENING = "0A"
MEMORY_BYTES = 16 << 20
"""Most by which strangers may make a process of the job grow."""


@dataclass
class Attacked:
    """A running job after the attacks. `got`: what each attack got."""

    job: Job
    got: dict[str, Any]
    listeners: dict[int, tuple[str, str]]
    grown: dict[int, int]
    flag: Path


def descendants(pid: int) -> list[int]:
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid, *(each for child in children for each in descendants(child))]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def listening(pids: list[int]) -> dict[int, tuple[str, str]]:
    """Address and command by port, of all TCP sockets at which the processes listen."""
    owners = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended since
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed since
                    owners[os.readlink(descriptor)] = pid
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENING and f"socket:[{words[9]}]" in owners:
                address, port = words[1].split(":")
                found[int(port, 16)] = (address, command_of(owners[f"socket:[{words[9]}]"]))
    return found


def memory_of(pids: Iterable[int]) -> dict[int, int]:
    """Resident bytes of the processes that still run: the one that plans the run ends by itself."""
    found = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = resident_bytes(pid)
    return found


@pytest.fixture(scope="module")
def attacked() -> Iterator[Attacked]:
    with tempfile.TemporaryDirectory(prefix="strangers-") as name:  # pytest's own folders are private
        folder = Path(name)
        folder.chmod(0o755)
        attacked = attack_job(folder)
        yield attacked
        if attacked.job.process.poll() is None:
            attacked.job.kill()


def attack_job(folder: Path) -> Attacked:
    """Start a job in a folder that other users may read, and attack it."""
    memory = folder / "memory"
    memory.mkdir(mode=0o1777)
    memory.chmod(0o1777)  # as /dev/shm
    (folder / "flags").mkdir()
    (folder / "flags").chmod(0o777)
    (folder / "runs").mkdir()
    job_secret(folder / "runs", {})  # as a job under plain torchrun leaves it
    shared_before = {path.name for path in Path("/dev/shm").iterdir()}
    checkpoint = {"checkpoint__every": 20, "checkpoint__in_memory_every": 2, "checkpoint__in_memory_dir": str(memory)}
    config = job_config(
        folder, GPT, parallel__tp=2, train__steps=1_000_000, train__precision="fp32", checkpoint__keep=2, **checkpoint
    )
    job = Job(config)
    try:
        job.wait_for_step(
            250
        )  # ranks grow until their first saves, and the event ring, have touched all of their memory
        pids = descendants(job.process.pid)
        listeners = listening(pids)
        store = next(port for port, (_, command) in listeners.items() if "store_server" in command)
        before = memory_of(pids)
        facts = {
            "ports": list(listeners),
            "pids": pids,
            "store": store,
            "flag": str(folder / "flags" / "ran"),
            "memory": str(memory),
            "copies": str(next(memory.glob("megascale-*/*"))),
            "run": str(job.folder),
            "secret": str(secret_file(folder / "runs")),
            "marks": [path.name for path in Path("/dev/shm").iterdir() if path.name not in shared_before]
            + ["megascale"],
        }
        assert any(memory.rglob("rank-*.?")), "no copies to read"
        got = attack_as(NOBODY, facts)
        assert "error" not in got, got["error"]
        grown = {pid: size - before[pid] for pid, size in memory_of(before).items()}
    except BaseException:
        job.kill()
        raise
    return Attacked(job, got, listeners, grown, folder / "flags" / "ran")


def flat(value: Any) -> list[str]:
    return [text for each in value for text in flat(each)] if isinstance(value, list) else [value]


def test_the_job_listens_on_loopback_alone(attacked: Attacked) -> None:
    assert attacked.listeners and {address for address, _ in attacked.listeners.values()} == {LOOPBACK}


@pytest.mark.parametrize(
    "attack",
    [
        "claims a rank in the store", "overwrites addresses", "overwrites control values", "writes a pickle",
        "deletes keys", "asks for all keys", "replays a handshake", "sends half a handshake", "sends HTTP",
        "sends a huge length", "crowds every port",
    ],
)  # fmt: skip
def test_a_stranger_gets_no_answer(attack: str, attacked: Attacked) -> None:
    assert attacked.got["user"] == NOBODY
    assert set(flat(attacked.got[attack])) == {""}


@pytest.mark.parametrize(
    "attack",
    [
        "reads environments", "reads memory", "lists descriptors", "opens the secret's descriptor",
        "writes to the writer's standard input", "signals", "reads the secret's file", "replaces the secret's file",
        "writes into the run", "writes a checkpoint", "leaves a copy in memory",
    ],
)  # fmt: skip
def test_a_stranger_has_no_permission(attack: str, attacked: Attacked) -> None:
    assert set(flat(attacked.got[attack])) == {"PermissionError"}


def test_a_stranger_cannot_trace(attacked: Attacked) -> None:
    assert set(attacked.got["traces"]) == {"Operation not permitted"}


@pytest.mark.parametrize("attack", ["reads shared memory", "reads copies in memory"])
def test_a_stranger_can_open_no_memory(attack: str, attacked: Attacked) -> None:
    assert attacked.got[attack] == []


def test_no_command_line_has_a_secret(attacked: Attacked) -> None:
    secret = secret_file(attacked.job.folder.parent).read_text()
    for command in attacked.got["reads command lines"]:
        assert secret not in command and all(len(word) < 64 or "/" in word for word in command.split("\0"))


def test_strangers_cost_no_memory(attacked: Attacked) -> None:
    assert max(attacked.grown.values()) < MEMORY_BYTES, attacked.grown


def test_a_job_starts_among_strangers_at_every_port() -> None:
    """Also at those of gloo, which ask for no secret."""
    with tempfile.TemporaryDirectory(prefix="strangers-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        write_text(ports := folder / "ports", "[]")
        job = Job(job_config(folder, GPT, parallel__tp=2, train__steps=1_000_000, train__precision="fp32"))
        crowd = crowd_as(NOBODY, ports)
        try:
            while job.process.poll() is None and len(job.steps()) < 8:
                with contextlib.suppress(OSError):  # a process has ended meanwhile
                    write_text(ports, json.dumps(list(listening(descendants(job.process.pid)))))
        finally:
            ports.unlink()
            os.waitpid(crowd, 0)
        job.signal(signal.SIGTERM)
        status, _, err = job.end()
    assert status == Exit.STOPPED, err
    assert "without the job's secret was refused at the job's store" in err


def test_the_job_has_trained_on_and_ends_in_order(attacked: Attacked) -> None:
    """Also the control data of the last checkpoint went through the store that was attacked."""
    job = attacked.job
    job.wait_for_step(job.steps()[-1]["step"] + 3)
    time.sleep(0.1)
    job.signal(signal.SIGTERM)
    status, out, err = job.end()
    assert status == Exit.STOPPED, err
    assert "stopped by a signal after step" in out and "saved" in out
    assert "without the job's secret was refused at the job's store" in err
    assert not attacked.flag.exists(), "code of a stranger ran"
