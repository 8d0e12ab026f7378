"""Bringing a job's processes together, and taking them apart."""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist
from torch.distributed import Store

from megascale.core.rank import Rank
from megascale.device import Device

STORE = "MEGASCALE_STORE"
"""Set by our own launcher to `host:port`; on rank 0 `host:port:fd` with the socket that already listens there."""

TIMEOUT = datetime.timedelta(minutes=30)
"""How long an operation may wait for another rank. A dead rank ends it at once; this bounds a rank that is stuck."""


def start(rank: Rank, device: Device, timeout: datetime.timedelta = TIMEOUT) -> None:
    """Join the job: rendezvous and open the default process group.

    The store is that of our launcher (on its own loopback socket), of torchrun, or MASTER_ADDR and MASTER_PORT; a world
    of one needs none.
    """
    if rank.world == 1:
        store: Store | None = dist.HashStore()
    elif STORE in os.environ:
        store = _own_store(rank, timeout)
    else:
        os.environ.setdefault("MASTER_PORT", "29500")
        store = None
    dist.init_process_group(device.backend, store=store, rank=rank.rank, world_size=rank.world, timeout=timeout)


def _own_store(rank: Rank, timeout: datetime.timedelta) -> Store:
    """TCPStore binds to every interface; a socket that was bound to loopback before is handed to it instead."""
    host, port, *listening = os.environ[STORE].split(":")
    first = rank.rank == 0
    socket = int(listening[0]) if first and listening else None
    return dist.TCPStore(host, int(port), rank.world, first, timeout, master_listen_fd=socket)


def stop() -> None:
    """Leave the job, if it was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
