"""The adapters of the scheduler port by name, as in `megascale launch --scheduler NAME`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megascale.core.network import LOOPBACK
from megascale.operate.driver.scheduler.jobset import PodScheduler, driver_endpoint
from megascale.operate.driver.scheduler.local import LocalScheduler, hosts_from_environment
from megascale.operate.driver.scheduler.port import AgentLaunch, Scheduler
from megascale.operate.driver.scheduler.slurm import SlurmScheduler, allocation_nodes, this_node


@dataclass(frozen=True)
class Adapter:
    """An adapter. `driver_endpoint`: the name or address of this process's node, at which agents reach the driver, and
    the port, 0 for any; `open`: the scheduler of a job with a number of nodes, spares included. Both raise
    SchedulerError. `revivable`: an agent can be started again on a lost node; `requestable`: further nodes may
    come.
    """

    driver_endpoint: Callable[[], tuple[str, int]]
    open: Callable[[int, AgentLaunch], Scheduler]
    revivable: bool
    requestable: bool


def _open_slurm(count: int, agent: AgentLaunch) -> SlurmScheduler:
    return SlurmScheduler(count, agent, allocation_nodes())


def _open_testbed(count: int, agent: AgentLaunch) -> LocalScheduler:
    return LocalScheduler(count, agent, hosts=hosts_from_environment())


ADAPTERS = {
    "local": Adapter(lambda: (LOOPBACK, 0), LocalScheduler, revivable=True, requestable=False),
    "testbed": Adapter(
        lambda: (hosts_from_environment()[0].address, 0), _open_testbed, revivable=False, requestable=True
    ),
    "slurm": Adapter(
        lambda: (this_node(allocation_nodes()).address, 0), _open_slurm, revivable=False, requestable=True
    ),
    "jobset": Adapter(driver_endpoint, lambda count, agent: PodScheduler(), revivable=False, requestable=True),
}
