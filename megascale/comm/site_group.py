"""The group of the same rank of several sites: what it sends between sites, through gloo on any device."""

from __future__ import annotations

import datetime

import torch.distributed as dist
from torch import Tensor

from megascale.comm.gloo_interface import own_address
from megascale.comm.group import Group
from megascale.comm.open_group import ProcessGroupTransport
from megascale.comm.progress import GlooWork, ProgressThread
from megascale.comm.site_meetings import Members
from megascale.comm.store import JobStore
from megascale.comm.work import TransportWork
from megascale.record.recorder import Recorder

AXIS = "sites"


class SiteTransport(ProcessGroupTransport):
    """gloo's all-gathers between sites, whose processes are of different jobs."""

    def __init__(self, backend: dist.ProcessGroupGloo) -> None:
        progress = ProgressThread(AXIS)
        super().__init__(None, lambda works, finish: GlooWork(works, finish, progress))
        self._backend = backend

    def all_gather(self, out: Tensor, part: Tensor) -> TransportWork:
        gather = self._backend._allgather_base  # type: ignore[attr-defined]  # torch's type stubs lack it
        return self._wrap_work([gather(out, part)], None)


def open_site_group(
    members: Members, place: int, rank: int, store: JobStore, host: str, recorder: Recorder,
    open_s: float, exchange_s: float,
) -> Group:  # fmt: skip
    """Connect this `rank` of the site at `place` among `members` with the same rank of the others. `host`: of the
    meeting point, toward which an interface is chosen. `open_s`, `exchange_s`: timeouts.

    Raises: RuntimeError if another site does not come
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(host))]
    options._timeout = datetime.timedelta(seconds=open_s)
    prefixed = dist.PrefixStore(f"{members.number}/rank {rank}", store)
    backend = dist.ProcessGroupGloo(prefixed, place, len(members.arrivals), options)
    backend._set_default_timeout(datetime.timedelta(seconds=exchange_s))
    return Group(AXIS, members.sites, place, recorder=recorder, transport=SiteTransport(backend))
