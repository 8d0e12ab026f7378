"""The ranks of this host, as the job's store knows them: two requests a rank, whatever launcher started the job."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megascale.core.rank import NODE_VARIABLE


def host_key() -> str:
    """Return a key that is equal for processes of the same host. A network namespace counts as a host (a testbed), and
    so does a namespace of process ids (a container): ids mean nothing elsewhere. So does a node of `driver.scheduler`.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    network, processes = (Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("net", "pid"))
    return f"{boot}/{network}/{processes}/{os.environ.get(NODE_VARIABLE, '')}"


def publish_rank(store: Any, rank: int) -> None:
    """Tell the other ranks of this host of this rank, before any rank leaves the rendezvous."""
    store.append(_key(), f"{rank} ")


def ranks_of_host(rank: int) -> tuple[int, ...]:
    """Return the global ranks of this host, ascending. Requires `comm.init.init_distributed`, where all have told."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return (rank,)
    store: Any = _get_default_store()
    store = store.underlying_store  # the job's: torch's has a prefix of the default process group
    return tuple(sorted(map(int, store.get(_key()).decode().split())))


def _key() -> str:
    return f"ranks of host {hashlib.sha256(host_key().encode()).hexdigest()[:16]}"
