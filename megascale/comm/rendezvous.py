"""Where the ranks of a job find its store: rank 0 starts the server, and all ranks connect.

A name without an address and a port that is taken get RETRY_S seconds to recover: a cluster publishes names, and an
earlier job ends, moments after this job's start.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import Store

from megascale.comm.store import JobStore
from megascale.core.errors import ConfigError, LostPeerError, MegascaleError, Problem
from megascale.core.limits import os_error_hint
from megascale.core.network import LOOPBACK, address_toward, is_loopback, listen, listen_as
from megascale.core.process import blocking_stops, module_command
from megascale.core.rank import STORE_VARIABLE, Rank, launcher_store, on_one_host, rendezvous_endpoint
from megascale.core.run_folder import TOKEN_VARIABLE
from megascale.core.wait_notice import WaitNotice, wait_notices
from megascale.operate.channel.handshake import NotAPeerError

RETRY_S = 30.0  # seconds in which an unknown name or a taken port may recover
SERVER_START_S = 60.0  # seconds in which rank 0's server process starts, however short `launch.start_timeout_s` is

SAME_SECRET_HINT = "the same MEGASCALE_JOB_SECRET on every host, or an output_dir that all hosts share"

RUN_KEY, RUN_TIMEOUT = "megascale/run", datetime.timedelta(seconds=RETRY_S)
"""Key of a run's token in torchrun's store, and the time that the store has to answer."""

_PAUSE_S = 0.5

T = TypeVar("T")


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

    Raises: ConfigError if no rendezvous address is set or usable, or if hosts have different secrets; LostPeerError if
    the store does not answer.
    """
    place = _place(rank, timeout)
    server, connect_s = None, timeout.total_seconds()
    if place.listener is not None:
        server = start_server(place.listener, secret)
        place.listener.close()
        connect_s = max(connect_s, SERVER_START_S)
    where = f"{place.address[0]}:{place.address[1]}"
    try:
        with wait_notices(rank, f"rank 0, which opens the job's store at {where}"):
            store = JobStore(place.address, secret, timeout, connect_s)
    except NotAPeerError as error:
        raise ConfigError([Problem(f"the job's store at {where}", "", str(error), SAME_SECRET_HINT)]) from None
    except OSError as error:
        seconds = timeout.total_seconds()
        text = f"timed out waiting {seconds:.0f} s for rank 0, which opens the job's store at {where}: {error}"
        hint = "see whether rank 0 runs, and whether its port can be reached"
        raise LostPeerError(text, peers=[0], hint=hint) from None
    atexit.register(_leave, store, server)  # torch keeps no reference to an object of Python, only to its C++ half
    return store


def start_server(listener: socket.socket, secret: bytes) -> subprocess.Popen[bytes]:
    """Start the process that serves the store at `listener`. It ends with this process, or with its standard input.

    Raises: MegascaleError if it cannot be started
    """
    descriptor = listener.fileno()
    command = module_command("megascale.operate.channel.store_server", str(descriptor), str(os.getpid()))
    try:
        with blocking_stops():
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[descriptor], start_new_session=True)
    except OSError as error:
        what = f"the process of the job's store cannot be started: {error.strerror}"
        raise MegascaleError(what, hint=os_error_hint(error, "free memory on the host")) from None
    assert process.stdin is not None
    process.stdin.write(secret.hex().encode() + b"\n")
    process.stdin.flush()
    return process


def _leave(store: JobStore, server: subprocess.Popen[bytes] | None) -> None:
    """Close this rank's connection, and end the server."""
    store.close()
    if server is not None and server.stdin is not None:
        with contextlib.suppress(OSError):
            server.stdin.close()
        server.wait()


def _place(rank: Rank, timeout: datetime.timedelta) -> _Place:
    first = rank.rank == 0
    if (ours := launcher_store()) is not None:
        name, number, descriptor = ours
        try:
            inherited = socket.socket(fileno=descriptor) if first and descriptor is not None else None
        except OSError as error:
            hint = "unset the variable: megascale train sets it for its ranks"
            what = f"descriptor {descriptor} is no socket: {error.strerror}"
            raise ConfigError([Problem("environment", STORE_VARIABLE, what, hint)]) from None
        return _Place((name, number), inherited)
    host, port = _master_address(rank)
    one_host = on_one_host(rank.world_size)
    with wait_notices(rank, f"rank 0 and torchrun's store at {host}:{port}"):
        if (agent := _torchruns_store(rank, timeout)) is not None:
            return _place_beside_torchrun(agent, host, rank, one_host)
    listener = _listen(LOOPBACK if one_host else host, port, rank) if first else None
    return _Place((LOOPBACK if one_host else host, port), listener)


def remember_run(rank: Rank) -> None:
    """Let rank 0 tell torchrun, if its agent has a store, which run it has begun (`core.run_folder`)."""
    token = os.environ.get(TOKEN_VARIABLE)
    if token and rank.rank == 0 and (store := _torchruns_store(rank, RUN_TIMEOUT)) is not None:
        store.set(RUN_KEY, token)


def run_of_torchrun(rank: Rank) -> str:
    """Return the token of the run that an earlier start by this torchrun has begun, "" without one.

    Raises: ConfigError if what its store has is no token
    """
    store = _torchruns_store(rank, RUN_TIMEOUT)
    token = store.get(RUN_KEY).decode(errors="replace") if store is not None and store.check([RUN_KEY]) else ""
    if token and not token.isalnum():
        message = f"{token[:100]!r} is no id of a run"
        raise ConfigError([Problem("torchrun's store", RUN_KEY, message, "another process of this network wrote it")])
    return token


def _torchruns_store(rank: Rank, timeout: datetime.timedelta) -> Store | None:
    """Connect to the store of torchrun's agents, which outlives their ranks. None if torchrun does not share it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = _master_address(rank)
    return dist.TCPStore(host, port, is_master=False, timeout=timeout)


def _place_beside_torchrun(agent: Store, host: str, rank: Rank, one_host: bool) -> _Place:
    """Find a place where torchrun's own store has the port: rank 0 takes a free one and writes it there."""
    key = f"megascale/store/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    listener = None
    if rank.rank == 0:
        here = LOOPBACK if one_host else address_toward(host)
        name = host if is_loopback(here) and not one_host else here  # on torchrun's own host
        listener = _listen(name, 0, rank)
        agent.set(key, f"{name} {listener.getsockname()[1]}")
    name, _, number = agent.get(key).decode(errors="replace").partition(" ")
    if not (number.isdecimal() and int(number) < 1 << 16):
        message = f"{name[:100]!r} is no address of the job's store"
        raise ConfigError([Problem("torchrun's store", key, message, "another process of this network wrote it")])
    return _Place((name, int(number)), listener)


def _listen(name: str, port: int, rank: Rank) -> socket.socket:
    try:
        where = f"port {port} of this host, which another process has"
        return _retry(lambda: listen(name, port) if is_loopback(name) else listen_as(name, port), rank, where)
    except OSError as error:
        hint = "another MASTER_PORT, or end the process that has this one"
        message = f"rank 0 cannot listen at {name}:{port}: {error.strerror or error}"
        raise ConfigError([Problem("environment", "MASTER_PORT", message, hint)]) from None


def _master_address(rank: Rank) -> tuple[str, int]:
    """Return rank 0's host and port: loopback for a job on this host, whose name may have no address. Fail here on an
    unknown host, which would be asked for until the timeout.
    """
    endpoint = rendezvous_endpoint()
    if endpoint is None:
        hint = "start with torchrun, srun or launch/torchrun.sh, or set it to the host of rank 0"
        what = f"not set, but {rank.variables} make this process one of several ranks" if rank.variables else "not set"
        raise ConfigError([Problem("environment", "MASTER_ADDR", what, hint)])
    host, port = endpoint
    if on_one_host(rank.world_size):
        return LOOPBACK, port
    try:
        _retry(lambda: socket.getaddrinfo(host, port), rank, f"an address of {host!r}")
    except OSError as error:
        hint = "a name or address of rank 0's host that all hosts can reach"
        raise ConfigError([Problem("environment", "MASTER_ADDR", f"{host!r}: {error.strerror}", hint)]) from None
    return host, port


def _retry(action: Callable[[], T], rank: Rank, awaited: str) -> T:
    """Call `action` until it succeeds, or RETRY_S seconds are over. Raises: OSError, the last"""
    notice = WaitNotice(rank)
    while True:
        try:
            return action()
        except OSError:
            if notice.waited_s > RETRY_S:
                raise
        notice.print_if_due(lambda: awaited)
        time.sleep(_PAUSE_S)
