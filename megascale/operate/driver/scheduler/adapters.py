"""The adapters of the scheduler port by name, as in `megascale launch --scheduler NAME`."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from megascale.core.errors import MegascaleError
from megascale.core.network import LOOPBACK, join_port, reserve_port_as
from megascale.operate.driver.scheduler.jobset import driver_endpoint
from megascale.operate.driver.scheduler.local import LocalScheduler, hosts_from_environment
from megascale.operate.driver.scheduler.none import NoScheduler
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

    def reserve(self) -> tuple[socket.socket, str, str]:
        """Keep a port for the drivers; return its socket, host:port where a driver listens, and where agents reach it.

        Raises: MegascaleError
        """
        name, port = self.driver_endpoint()
        try:
            reserved, host = reserve_port_as(name, port)
        except OSError as error:
            what = f"the driver cannot listen at {join_port(name, port)}: {error.strerror or error}"
            hint = "see that this host's name has an address, and that no other process has the port"
            raise MegascaleError(what, hint=hint) from None
        port = reserved.getsockname()[1]
        return reserved, f"{host}:{port}", join_port(name, port)


ADAPTERS = {
    "local": Adapter(lambda: (LOOPBACK, 0), LocalScheduler, revivable=True, requestable=False),
    "testbed": Adapter(
        lambda: (hosts_from_environment()[0].address, 0),
        lambda count, agent: LocalScheduler(count, agent, hosts=hosts_from_environment()),
        revivable=False, requestable=True,
    ),
    "slurm": Adapter(
        lambda: (this_node(allocation_nodes()).address, 0),
        lambda count, agent: SlurmScheduler(count, agent, allocation_nodes()), revivable=False, requestable=True,
    ),
    "jobset": Adapter(driver_endpoint, lambda count, agent: NoScheduler(), revivable=False, requestable=True),
}  # fmt: skip
