"""What another user of the host tries against a running job, and what each attack gets."""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401  for names of hosts: another user could not import it later
import json
import os
import pickle
import socket
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONNECTIONS = 100
CROWD_S = 150
"""Most seconds of a crowd."""


def attack_as(user: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Make every attack in a process of another user. Forked, because the user may not read Python's own files."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            answer: Any = attack(facts)
        except BaseException:
            answer = {"error": traceback.format_exc()}
        with open(writing, "w", encoding="utf-8") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    os.waitpid(child, 0)
    return found


def attack(facts: dict[str, Any]) -> dict[str, Any]:
    """Make every attack. `facts`: pids, ports and folders of the job, which any user finds in /proc."""
    ports, pids, store = facts["ports"], facts["pids"], facts["store"]
    return {
        "user": os.geteuid(),
        "claims a rank in the store": talk(store, tcp_store_set("init/rank", b"1") + tcp_store_add("init/count", 1)),
        "overwrites addresses": [talk(store, tcp_store_set(f"0//cpu//0/{rank}", b"\x7f\0\0\1" * 8)) for rank in (0, 1)],
        "overwrites control values": talk(store, tcp_store_set("control/lost", b"remote process exited: rank 0")),
        "writes a pickle": talk(store, tcp_store_set("object", pickle.dumps(Poison(facts["flag"])))),
        "deletes keys": talk(store, b"\x08" + text("control/place/0")),
        "asks for all keys": talk(store, b"\x11"),
        "replays a handshake": talk(store, bytes(64) + bytes(32)),
        "sends half a handshake": talk(store, bytes(63), wait=0.2),
        "sends HTTP": talk(store, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10),
        "sends a huge length": [talk(port, struct.pack("<QQ", 2**63, 2**62) * 8, wait=0.2) for port in ports],
        "crowds every port": [crowd(port) for port in ports],
        "reads environments": [denied(lambda p=pid: Path(f"/proc/{p}/environ").read_bytes()) for pid in pids],
        "reads memory": [denied(lambda p=pid: open(f"/proc/{p}/mem", "rb").read(1)) for pid in pids],
        "lists descriptors": [denied(lambda p=pid: os.listdir(f"/proc/{p}/fd")) for pid in pids],
        "opens the secret's descriptor": [
            denied(lambda p=pid, n=number: Path(f"/proc/{p}/fd/{n}").read_bytes())
            for pid in pids
            for number in range(64)  # also a ring of shared memory
        ],
        "writes to the writer's standard input": [
            denied(lambda p=pid: Path(f"/proc/{p}/fd/0").write_bytes(b"{}\n")) for pid in pids
        ],
        "traces": [traced(pid) for pid in pids],
        "signals": [denied(lambda p=pid: os.kill(p, 9)) for pid in pids],
        "reads command lines": [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids],
        "reads shared memory": readable(Path("/dev/shm"), facts["marks"]),
        "reads copies in memory": readable(Path(facts["memory"]), [""]),
        "reads the secret's file": denied(lambda: Path(facts["secret"]).read_bytes()),
        "replaces the secret's file": denied(lambda: Path(facts["secret"]).unlink()),
        "writes into the run": denied(lambda: (Path(facts["run"]) / "config.toml").write_text("")),
        "writes a checkpoint": denied(lambda: (Path(facts["run"]) / "checkpoints/step-99999999").mkdir()),
        "leaves a copy in memory": denied(lambda: (Path(facts["copies"]) / "rank-00000.a.json").write_text("{}")),
    }


class Poison:
    """An object whose pickle makes the folder `path`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (self.path,)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def tcp_store_set(key: str, value: bytes) -> bytes:
    """A request of torch's TCPStore, after its greeting."""
    return b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x01" + text(key) + text(value)


def tcp_store_add(key: str, amount: int) -> bytes:
    return b"\x04" + text(key) + struct.pack("<q", amount)


def talk(port: int, data: bytes, wait: float = 10.0) -> str:
    """Everything that a server answers to `data`, until it hangs up or for `wait` seconds."""
    received = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.settimeout(wait)
        connection.sendall(data + bytes(128))
        while part := connection.recv(1 << 16):
            received += part
    return received.hex()


def crowd(port: int) -> str:
    """What a hundred connections get that stay open and send a MiB each."""
    received, connections = b"", []
    for number in range(CONNECTIONS):
        with contextlib.suppress(OSError):
            connections.append(socket.create_connection(("127.0.0.1", port), 10))
            connections[-1].settimeout(0.05)
            connections[-1].sendall((b"\xff" if number % 2 else b"{") * (1 << 20))
    for connection in connections:
        with contextlib.suppress(OSError):
            received += connection.recv(1 << 16)
        connection.close()
    return received.hex()


def crowd_as(user: int, ports: Path) -> int:
    """Fork a process of another user that connects to the ports in the file `ports`, again and again, and says
    something there, until the file is gone. Returns its pid.
    """
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            _crowd_ports(ports)
        os._exit(0)
    return child


def _crowd_ports(ports: Path) -> None:
    words = (bytes(128), tcp_store_set("init/rank", b"1"), b"GET / HTTP/1.1\r\n\r\n", struct.pack("<QQ", 2**62, 1) * 8)
    connections: deque[socket.socket] = deque(maxlen=8 * CONNECTIONS)  # the oldest end as they are collected
    deadline = time.monotonic() + CROWD_S
    while ports.exists() and time.monotonic() < deadline:
        for port in json.loads(ports.read_text()):
            with contextlib.suppress(OSError):
                connections.append(socket.create_connection(("127.0.0.1", port), 0.5))
                connections[-1].settimeout(0.2)
                connections[-1].sendall(words[len(connections) % len(words)])


def denied(attempt: Callable[[], object]) -> str:
    """The name of the error of an attempt; its result if there is none."""
    try:
        return repr(attempt())[:100]
    except OSError as error:
        return type(error).__name__


def traced(pid: int) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    attach = 16
    return "attached" if libc.ptrace(attach, pid, 0, 0) == 0 else os.strerror(ctypes.get_errno())


def readable(folder: Path, marks: list[str]) -> list[str]:
    """Files of a folder that this user can open, with one of `marks` in their names."""
    found = []
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                if any(mark in name for mark in marks) and (Path(parent) / name).open("rb"):
                    found.append(f"{parent}/{name}")
    return found
