"""The place of an agent in a job: its node, and where the driver is."""

from __future__ import annotations

from dataclasses import dataclass

DRIVER_LOST = 75
"""Exit status of an agent whose driver stayed away for `fault.agent_grace_s`; EX_TEMPFAIL of sysexits.h."""


@dataclass(frozen=True)
class NodePlace:
    """The node of an agent. `address`: where other nodes reach it; `driver`: host:port of the driver; `slots`: ranks
    that it can run. `run`: which an observer watches, "" for the agent of a launched job.
    """

    node: str
    address: str
    driver: str
    slots: int
    run: str = ""
