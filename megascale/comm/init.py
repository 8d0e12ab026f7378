"""Joining a distributed job and leaving it: rendezvous, store and default process group."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path

import torch.distributed as dist

from megascale.comm.control import leave_job
from megascale.comm.gloo_interface import interface_problems, prepare_gloo
from megascale.comm.lost_peer import opening_group
from megascale.comm.meeting import Record, meet
from megascale.comm.nccl_options import environment_problems, nccl_options, set_network_patience
from megascale.config.launch import LaunchConfig, NcclConfig
from megascale.core.errors import ConfigError
from megascale.core.rank import Rank
from megascale.device import Device

STORE_IDLE_S = 0.05
"""Seconds in which a thread of NCCL's that asks the store once a second ends its request after the shutdown."""


def init_distributed(
    rank: Rank,
    device: Device,
    launch: LaunchConfig = LaunchConfig(),
    nccl: NcclConfig = NcclConfig(),
    *,
    record: Record | None = None,
    folder: Path | None = None,
) -> None:
    """Join the job: rendezvous, and open the default process group. `record`: what must be equal on all ranks, compared
    before any group opens. `folder`: where the job's secret is kept if the environment has none (`channel.secret`).

    The store is rank 0's (`comm.rendezvous`), at the socket of our launcher, at a port that torchrun's store names, or
    at MASTER_ADDR and MASTER_PORT, which a Slurm step need not set; a job of one rank has a store of its own. The
    timeout is `launch.start_timeout_s`.

    `device_id` is not passed to torch: with a `device_id` NCCL would create the communicator of all ranks here and
    split every group from it, a collective of the whole job per group. Without a `device_id` the members of a group
    create its communicator at the first use (`comm.warm_up`). `comm.mesh.open_mesh` works either way.

    Raises: ConfigError if no rendezvous address is set, if the host cannot be resolved, if this rank has not the job's
    secret, or if an environment variable would make NCCL hang or names no interface; HostsDisagreeError if the ranks'
    records differ; LostPeerError for ranks that do not come.
    """
    problems = list(environment_problems(device.backend, os.environ))
    if device.backend == "gloo":
        problems += interface_problems()
    if problems:
        raise ConfigError(problems)
    set_network_patience(device.backend, nccl, os.environ)
    timeout = datetime.timedelta(seconds=launch.start_timeout_s)
    store = meet(rank, timeout, record or {}, folder)
    backend = prepare_gloo(device.backend, store, rank.world_size)
    with opening_group("world", range(rank.world_size), rank.rank):
        dist.init_process_group(
            backend,
            store=store,
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timeout,
            pg_options=nccl_options(backend, "world", nccl, timeout),
        )


def shutdown_distributed() -> None:
    """Leave the job, if this process has joined one."""
    if dist.is_initialized():
        leave_job()
        world = dist.group.WORLD
        dist.destroy_process_group()
        time.sleep(STORE_IDLE_S)
        del world  # its destructor waits, with Python's lock, for a thread of NCCL's that may be asking the store
