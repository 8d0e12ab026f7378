"""Commands of the job's state machine (`driver.job`) to the driver, which carries them out in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megascale.operate.channel.messages import DriverMessage


@dataclass(frozen=True)
class Send:
    """Send a message to a node's agent."""

    node: str
    message: DriverMessage


@dataclass(frozen=True)
class Log:
    """Append an event to the log of incidents. It is applied to the job's history already."""

    event: Mapping[str, Any]


@dataclass(frozen=True)
class Say:
    """Print a line for people."""

    text: str


@dataclass(frozen=True)
class StartAgent:
    """Start the agent of a node that the job holds, in place of one that runs. `after_s`: seconds before the start."""

    node: str
    after_s: float = 0.0


@dataclass(frozen=True)
class Exclude:
    """Give the node back to the scheduler; it gets no work of this job before `until`."""

    node: str
    reason: str
    until: float


@dataclass(frozen=True)
class Request:
    """Ask the scheduler for further nodes, and start their agents."""

    count: int


@dataclass(frozen=True)
class CheckNodes:
    """Check nodes that an incident puts in doubt. `paths`: which of them reach each other, else each alone; `report`:
    only print the findings, because ranks run; else each node is held until `Job.checked` has its verdict.
    """

    nodes: tuple[str, ...]
    paths: bool
    report: bool


@dataclass(frozen=True)
class Finish:
    """End the job with an exit status."""

    status: int


Command = Send | Log | Say | StartAgent | Exclude | Request | CheckNodes | Finish
