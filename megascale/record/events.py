"""Events as values: what timelines are drawn of, from recorded or simulated runs.

- `Event`: an action or a communication; `RankEvents`: those of a rank
- `single_wait`, `follow_channels`: what a log does not have of an event
- `COMPUTE`, `HOST_AXIS`, `PAUSE`, `OPTIMIZER_ACTIONS`: names that events have
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megascale.record.label import Label

COMPUTE = "compute"  # the axis of compute actions

HOST_AXIS = "host"
"""The axis of what the host does beside compute and communication: data, gc, evaluation, checkpoint, pause."""

PAUSE = "pause"
"""The activity of the host in which the process does nothing: it is stopped or frozen, gets no core, or a call holds
Python's lock. It lies in other actions and waits, so that none of it is exposed.
"""

OPTIMIZER_ACTIONS = frozenset({"grad_norm", "compute_updates", "update"})
"""The optimizer's actions in a step: gradient norm, LAMB's first phase (update directions), and update."""


@dataclass(frozen=True, slots=True)
class Event:
    """A compute action (F, B, update, ...) or a communication.

    `axis`: COMPUTE, or the axis of parallelism (tp, cp, dp, pp, tied, world). `name`: the action, or the collective or
    point-to-point operation. `chunk` and `microbatch`: -1 for work that belongs to no model chunk or micro-batch.
    `part`, `layer`, `stage`, `direction`: the tensor's label (`record.label.Label`).

    Communications also have their `group`, their `sequence` number in the group, the `bytes` of the full tensor, the
    global rank of the `peer` of a point-to-point message (else -1), the time of `issue`, and `waits`: the spans in
    which compute on this rank waited for the communication. The sum of the waits is the exposed time.
    """

    axis: str
    name: str
    part: str
    step: int
    chunk: int
    microbatch: int
    start: float
    end: float
    group: str = ""
    sequence: int = -1
    bytes: int = 0
    peer: int = -1
    issue: float = 0.0
    waits: tuple[tuple[float, float], ...] = ()
    layer: int = -1
    stage: int = -1
    direction: str = ""

    @property
    def label(self) -> str:
        """The label as text, such as 'layer 3 qkv'."""
        return Label(self.part, self.layer, self.stage, self.direction).text(self.microbatch)

    @property
    def exposed(self) -> float:
        """Exposed time in seconds."""
        return sum(end - start for start, end in self.waits)


@dataclass(frozen=True)
class RankEvents:
    """The events of one rank in order of issue.

    `coord`: the rank's index on each axis. `clock`: measurements (local time, offset of rank 0's clock), in seconds.
    `dropped`: number of events that were overwritten before they were read.
    """

    rank: int
    world: int
    coord: dict[str, int]
    host: str
    clock: tuple[tuple[float, float], ...]
    dropped: int
    events: tuple[Event, ...]

    def clock_offset(self, time: float) -> float:
        """Seconds by which rank 0's clock is ahead at a local time, interpolated linearly between measurements."""
        points = sorted(self.clock)
        if not points:
            return 0.0
        for (t0, offset0), (t1, offset1) in itertools.pairwise(points):
            if t0 <= time <= t1 and t1 > t0:
                return offset0 + (offset1 - offset0) * (time - t0) / (t1 - t0)
        return points[0][1] if time < points[0][0] else points[-1][1]


def single_wait(issue: float, end: float, exposed: float) -> tuple[tuple[float, float], ...]:
    """Return one wait of `exposed` seconds for a communication, where single waits are not known: until its end, but
    not from before its issue.
    """
    start = max(issue, end - exposed)
    return ((start, start + exposed),) if exposed else ()


def follow_channels(events: Iterable[Event]) -> list[Event]:
    """Return events, in the order of issue, of which a communication starts at its issue, or at the end of the one
    before it in its channel, if later. A channel is a group, and the direction and the peer of messages.
    """
    ends: dict[tuple[str, str, int], float] = {}
    found = []
    for event in events:
        start = event.start
        if event.axis != COMPUTE:
            channel = (event.group, event.name if event.peer >= 0 else "", event.peer)
            previous_end = ends.get(channel, event.issue)
            ends[channel] = max(previous_end, event.end)  # a synchronous one may overtake background communication
            start = min(max(event.issue, previous_end), event.end)
        found.append(replace(event, start=start))
    return found
