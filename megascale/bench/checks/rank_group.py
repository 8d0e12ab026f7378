"""The group of ranks of a check: finds the store of the group through an endpoint, and opens the job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megascale.comm.init import init_distributed, shutdown_distributed
from megascale.config.launch import LaunchConfig
from megascale.core.network import listen_as
from megascale.core.rank import STORE_VARIABLE, Rank, rank_from_environment
from megascale.device import Device, detect_device
from megascale.operate.health.checks.endpoint import EndpointClient, check_secret

START_S = 30.0  # seconds in which all ranks of the group must come


@contextlib.contextmanager
def rank_group(arguments: Mapping[str, Any]) -> Iterator[tuple[Rank, Device]]:
    """Join the ranks of the argument `group`; without one, the ranks of this node alone, whose launcher has the store.

    `group`: `world` and this node's `ranks`; `endpoint`, the address of the endpoint of rank 0's node, where rank 0
    posts the address of the store under `key`, unused before.
    """
    rank = rank_from_environment()
    assert rank is not None, "health.checks.runner sets the variables of a rank"
    if (group := arguments.get("group")) is not None and rank.world_size > 1:
        os.environ[STORE_VARIABLE] = _store(rank, group, arguments)
    device = detect_device(rank.local_rank)
    folder = arguments.get("secret_folder")
    launch = LaunchConfig.model_validate({"start_timeout_s": START_S})
    init_distributed(rank, device, launch, folder=Path(folder) if folder else None)
    try:
        yield rank, device
    finally:
        shutdown_distributed()


def _store(rank: Rank, group: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Return the value of STORE_VARIABLE: rank 0 listens, and posts its address; the other ranks fetch the address."""
    with EndpointClient(group["endpoint"], check_secret(arguments)) as endpoint:
        if rank.rank:
            return str(endpoint.request("fetch", key=group["key"])["value"])
        host = str(arguments["host"])
        listener = listen_as(host)
        address = f"{host}:{listener.getsockname()[1]}"
        endpoint.request("post", key=group["key"], value=address)
    return f"{address}:{listener.detach()}"
