"""Where the ranks of a job find its store: rank 0 starts the server, and all ranks connect."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import socket
import subprocess
from dataclasses import dataclass

import torch.distributed as dist

from megascale.comm.store import JobStore
from megascale.comm.store_server import start_server
from megascale.core.errors import ConfigError, Problem
from megascale.core.handshake import NotAPeerError
from megascale.core.network import LOOPBACK, address_toward, is_loopback, listen, listen_as
from megascale.core.rank import STORE_VARIABLE, Rank, on_one_host, rendezvous_endpoint

SAME_SECRET_HINT = "the same MEGASCALE_JOB_SECRET on every host, or an observe.dir that all hosts share"


@dataclass(frozen=True)
class _Place:
    """The address of the job's store, and on rank 0 the socket that listens there."""

    address: tuple[str, int]
    listener: socket.socket | None


def open_store(rank: Rank, secret: bytes, timeout: datetime.timedelta) -> JobStore:
    """Return this rank's connection to the job's store; rank 0 starts the server before.

    The server listens on loopback for ranks of one host, else at the address by which the other hosts reach rank 0. An
    address in a store of torchrun is only a hint, because anyone may write there: the server proves that it knows the
    job's secret.

    Raises: ConfigError if no rendezvous address is set or usable, or if hosts have different secrets; TimeoutError
    """
    place = _place(rank, timeout)
    server = None
    if place.listener is not None:
        server = start_server(place.listener, secret)
        place.listener.close()
    where = f"{place.address[0]}:{place.address[1]}"
    try:
        store = JobStore(place.address, secret, timeout)
    except NotAPeerError as error:
        raise ConfigError([Problem(f"the job's store at {where}", "", str(error), SAME_SECRET_HINT)]) from None
    except OSError as error:
        seconds = timeout.total_seconds()
        raise TimeoutError(f"timed out waiting {seconds:.0f} s for the job's store at {where}: {error}") from None
    atexit.register(_leave, store, server)  # torch keeps no reference to an object of Python, only to its C++ half
    return store


def _leave(store: JobStore, server: subprocess.Popen[bytes] | None) -> None:
    """Close this rank's connection, and end the server."""
    store.close()
    if server is not None and server.stdin is not None:
        with contextlib.suppress(OSError):
            server.stdin.close()
        server.wait()


def _place(rank: Rank, timeout: datetime.timedelta) -> _Place:
    first = rank.rank == 0
    if STORE_VARIABLE in os.environ:
        name, number, *descriptor = os.environ[STORE_VARIABLE].split(":")
        inherited = socket.socket(fileno=int(descriptor[0])) if first and descriptor else None
        return _Place((name, int(number)), inherited)
    host, port = _master_address()
    one_host = on_one_host(rank.world_size)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _place_beside_torchrun(host, port, first, one_host, timeout)
    listener = _listen(LOOPBACK if one_host else host, port) if first else None
    return _Place((LOOPBACK if one_host else host, port), listener)


def _place_beside_torchrun(host: str, port: int, first: bool, one_host: bool, timeout: datetime.timedelta) -> _Place:
    """Find a place where torchrun's own store has the port: rank 0 takes a free one and writes it there."""
    agent = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    key = f"megascale/store/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    listener = None
    if first:
        here = LOOPBACK if one_host else address_toward(host)
        name = host if is_loopback(here) and not one_host else here  # on torchrun's own host
        listener = _listen(name, 0)
        agent.set(key, f"{name} {listener.getsockname()[1]}")
    name, _, number = agent.get(key).decode(errors="replace").partition(" ")
    if not (number.isdecimal() and int(number) < 1 << 16):
        message = f"{name[:100]!r} is no address of the job's store"
        raise ConfigError([Problem("torchrun's store", key, message, "another process of this network wrote it")])
    return _Place((name, int(number)), listener)


def _listen(name: str, port: int) -> socket.socket:
    try:
        return listen(name, port) if is_loopback(name) else listen_as(name, port)
    except OSError as error:
        hint = "another MASTER_PORT, or end the process that has this one"
        message = f"rank 0 cannot listen at {name}:{port}: {error.strerror or error}"
        raise ConfigError([Problem("environment", "MASTER_PORT", message, hint)]) from None


def _master_address() -> tuple[str, int]:
    """Return rank 0's host and port. Fail here on an unknown host, which would be asked for until the timeout."""
    endpoint = rendezvous_endpoint()
    if endpoint is None:
        hint = "start with torchrun, srun or launch/torchrun.sh, or set it to the host of rank 0"
        raise ConfigError([Problem("environment", "MASTER_ADDR", "not set", hint)])
    host, port = endpoint
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        hint = "a name or address of rank 0's host that all hosts can reach"
        raise ConfigError([Problem("environment", "MASTER_ADDR", f"{host!r}: {error.strerror}", hint)]) from None
    return host, port
