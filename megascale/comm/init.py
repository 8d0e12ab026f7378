"""Joining a distributed job and leaving it: rendezvous, store and default process group."""

from __future__ import annotations

import datetime
import os
import socket

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from megascale.comm import control
from megascale.comm.agreement import Record, check_agreement
from megascale.comm.nccl_options import environment_problems, nccl_options
from megascale.config.launch import LaunchConfig
from megascale.config.nccl import NcclConfig
from megascale.core.errors import ConfigError, Problem
from megascale.core.rank import STORE_VARIABLE, Rank, rendezvous_endpoint
from megascale.device import Device


def init_distributed(
    rank: Rank,
    device: Device,
    launch: LaunchConfig = LaunchConfig(),
    nccl: NcclConfig = NcclConfig(),
    *,
    pp: int = 1,
    record: Record | None = None,
) -> None:
    """Join the job: rendezvous, and open the default process group. `pp`: pipeline stages of the job. `record`: what
    must be equal on all ranks, compared before any group opens.

    The store is our launcher's (on its loopback socket), torchrun's, or the store at MASTER_ADDR and MASTER_PORT, which
    a Slurm step need not set; a job of one rank has its own. The timeout is `launch.start_timeout_s`.

    `device_id` is not passed to torch: with a `device_id` NCCL would create the communicator of all ranks here and
    split every group from it, a collective of the whole job per group. Without a `device_id` the members of a group
    create its communicator at the first use (`comm.warm_up`). `comm.mesh.open_mesh` works either way.

    Raises: ConfigError if no rendezvous address is set, if the host cannot be resolved, or if an environment variable
    would make NCCL hang; HostsDisagreeError if the ranks' records differ.
    """
    problems = list(environment_problems(device.backend, pp, os.environ))
    if problems:
        raise ConfigError(problems)
    timeout = datetime.timedelta(seconds=launch.start_timeout_s)
    store = _open_store(rank, timeout)
    if record is not None and rank.world_size > 1:
        check_agreement(store, rank, record)
    dist.init_process_group(
        device.backend,
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timeout,
        pg_options=nccl_options(device.backend, "world", nccl),
    )


def _open_store(rank: Rank, timeout: datetime.timedelta) -> Store:
    """Open the job's store. Rank 0 does not wait here for the other ranks: their number may be in dispute."""
    if rank.world_size == 1:
        return dist.HashStore()
    first = rank.rank == 0
    if STORE_VARIABLE in os.environ:  # TCPStore would listen on every interface, so rank 0 passes a loopback socket
        host, port, *listening = os.environ[STORE_VARIABLE].split(":")
        listener = int(listening[0]) if first and listening else None
        return dist.TCPStore(
            host, int(port), rank.world_size, first, timeout, wait_for_workers=False, master_listen_fd=listener
        )
    host, number = _master_address()
    serves = first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun's agent serves
    store = dist.TCPStore(host, number, rank.world_size, serves, timeout, wait_for_workers=False, multi_tenant=True)
    return PrefixStore("megascale", store)  # torchrun's agents keep values of their own in the store


def _master_address() -> tuple[str, int]:
    """Return and set MASTER_ADDR and MASTER_PORT. Fail here on an unknown host, which torch would retry until the
    timeout.
    """
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
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    return host, port


def shutdown_distributed() -> None:
    """Leave the job, if this process has joined one."""
    if dist.is_initialized():
        control.leave_job()
        dist.destroy_process_group()
