"""The adapters of the scheduler port by name, as in `megascale launch --scheduler NAME`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megascale.core.network import LOOPBACK
from megascale.fault.scheduler.local import LocalScheduler
from megascale.fault.scheduler.port import AgentLaunch, Scheduler
from megascale.fault.scheduler.slurm import SlurmScheduler, allocation_nodes, this_node


@dataclass(frozen=True)
class Adapter:
    """An adapter. `driver_host`: the name or address of this process's node, at which agents reach the driver; `open`:
    the scheduler of a job with a number of nodes, spares included. Both raise SchedulerError.
    """

    driver_host: Callable[[], str]
    open: Callable[[int, AgentLaunch], Scheduler]


def _open_slurm(count: int, agent: AgentLaunch) -> SlurmScheduler:
    return SlurmScheduler(count, agent, allocation_nodes())


ADAPTERS = {
    "local": Adapter(lambda: LOOPBACK, LocalScheduler),
    "slurm": Adapter(lambda: this_node(allocation_nodes()).address, _open_slurm),
}
