"""The meeting of a job's ranks at its store, where they agree, before any group opens."""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path

import torch.distributed as dist
from torch.distributed import DistError, Store

from megascale.comm import agreement
from megascale.comm.agreement import FAILED_START_S, Record, check_agreement
from megascale.comm.gloo_interface import publish_address
from megascale.comm.host_ranks import publish_rank
from megascale.comm.rendezvous import open_store
from megascale.core.errors import MegascaleError
from megascale.core.rank import Rank
from megascale.operate.channel.secret import job_secret


def meet(rank: Rank, timeout: datetime.timedelta, record: Record, folder: Path | None) -> Store:
    """Return the job's store when all ranks have come and agree on `record`; one of its own for a rank alone."""
    if rank.world_size == 1:
        return dist.HashStore()
    store = open_store(rank, job_secret(folder), timeout)
    publish_address(store)
    publish_rank(store, rank.rank)
    check_agreement(store, rank, record)
    return store


def announce_failed_start(rank: Rank, reason: str, folder: Path | None) -> None:
    """Tell the ranks of other hosts, which would wait for this one, why it does not come. `folder`: as of
    `comm.init.init_distributed`. A store that cannot be reached within seconds is left alone.
    """
    with contextlib.suppress(MegascaleError, OSError, DistError):
        store = open_store(rank, job_secret(folder), datetime.timedelta(seconds=FAILED_START_S))
        agreement.announce_failed_start(store, rank, reason)
