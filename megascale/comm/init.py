"""Bringing a job's processes together, and taking them apart."""

from __future__ import annotations

import datetime
import os
import socket

import torch.distributed as dist
from torch.distributed import Store

from megascale.comm import control
from megascale.comm.nccl import options, refused
from megascale.config.launch import LaunchConfig
from megascale.config.nccl import NcclConfig
from megascale.core.errors import ConfigError, Problem
from megascale.core.rank import STORE, Rank, meeting_place
from megascale.device import Device


def start(
    rank: Rank,
    device: Device,
    launch: LaunchConfig = LaunchConfig(),
    nccl: NcclConfig = NcclConfig(),
    *,
    pp: int = 1,
) -> None:
    """Join the job: rendezvous and open the default process group. `pp`: pipeline stages of the job.

    The store is that of our launcher (on its own loopback socket), of torchrun, or at MASTER_ADDR and MASTER_PORT,
    which a Slurm step need not set; a world of one needs none. Nothing waits longer than `launch.start_timeout_s`.

    No `device_id` is given. With it NCCL would make the communicator of all ranks here and split each group off it, a
    collective of the whole job for every group; without, a group's communicator is made by its members alone, at its
    first use (`comm.warm_up`). Groups are opened so that both work (`comm.mesh.open_mesh`).

    Raises: ConfigError if nothing says where to meet, there is no host of that name, or a variable of the environment
    would make NCCL hang.
    """
    problems = list(refused(device.backend, pp, os.environ))
    if problems:
        raise ConfigError(problems)
    timeout = datetime.timedelta(seconds=launch.start_timeout_s)
    if rank.world == 1:
        store: Store | None = dist.HashStore()
    elif STORE in os.environ:
        store = _own_store(rank, timeout)
    else:
        _find_meeting_place()
        store = None
    dist.init_process_group(
        device.backend,
        store=store,
        rank=rank.rank,
        world_size=rank.world,
        timeout=timeout,
        pg_options=options(device.backend, "world", nccl),
    )


def _own_store(rank: Rank, timeout: datetime.timedelta) -> Store:
    """TCPStore binds to every interface; a socket that was bound to loopback before is handed to it instead."""
    host, port, *listening = os.environ[STORE].split(":")
    first = rank.rank == 0
    listener = int(listening[0]) if first and listening else None
    return dist.TCPStore(host, int(port), rank.world, first, timeout, master_listen_fd=listener)


def _find_meeting_place() -> None:
    """Set MASTER_ADDR and MASTER_PORT. A name that no one knows would be tried until the timeout."""
    place = meeting_place()
    if place is None:
        found, mend = "not set", "start with torchrun, srun or launch/torchrun.sh, or set it to the host of rank 0"
        raise ConfigError([Problem("environment", "MASTER_ADDR", found, mend)])
    host, port = place
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        found, mend = f"{host!r}: {error.strerror}", "a name or address of rank 0's host that all hosts can reach"
        raise ConfigError([Problem("environment", "MASTER_ADDR", found, mend)]) from None
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))


def stop() -> None:
    """Leave the job, if it was joined."""
    if dist.is_initialized():
        control.part()
        dist.destroy_process_group()
