"""Intermediate representation of pipeline schedules: a list of actions per rank.

A compute schedule has forwards, backwards and recomputations only. `megascale.schedule.lower` adds communication; the
executor runs the lowered schedule, the simulator estimates its time, tests prove its properties.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple


class Kind(enum.StrEnum):
    """Kinds of actions. SEND and RECV move an activation between stages (F) or its gradient (B)."""

    F = "F"
    B = "B"
    R = "R"  # recompute a forward whose activations were dropped, from its saved input
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_PARAMS = "WAIT_PARAMS"  # wait for the all-gather of the chunk's weights
    REDUCE = "REDUCE"  # start the data-parallel reduction of the chunk's accumulated gradients


class Action(NamedTuple):
    """An action of a rank on a model chunk and a micro-batch.

    SEND_F sends the output of (chunk, microbatch) to the next virtual stage, RECV_F receives its input; SEND_B sends
    the gradient of its input to the previous stage, RECV_B receives the gradient of its output. WAIT_PARAMS and REDUCE
    apply to the whole chunk; their micro-batch is that of the forward after or the backward before them.
    """

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.microbatch}"


RankSchedule = list[Action]
"""The actions of one rank."""

Schedule = list[RankSchedule]
"""The actions of all pipeline ranks, by rank."""

ScheduleFn = Callable[[int, int, int, int], RankSchedule]
"""A schedule: a function (p ranks, v chunks per rank, m micro-batches, rank) -> the compute actions of the rank."""


def forward(chunk: int, microbatch: int) -> Action:
    """Create the forward of a micro-batch on a chunk."""
    return Action(Kind.F, chunk, microbatch)


def backward(chunk: int, microbatch: int) -> Action:
    """Create the backward of a micro-batch on a chunk."""
    return Action(Kind.B, chunk, microbatch)


def recomputation(chunk: int, microbatch: int) -> Action:
    """Create the recomputation of a micro-batch's forward on a chunk, before its backward."""
    return Action(Kind.R, chunk, microbatch)


def build_schedule(order: ScheduleFn, p: int, v: int, m: int) -> Schedule:
    """List the compute actions of all p ranks."""
    return [order(p, v, m, rank) for rank in range(p)]


def forwards_only(schedule: Schedule) -> Schedule:
    """Drop the backwards of a compute schedule, for an evaluation."""
    return [[action for action in order if action.kind is Kind.F] for order in schedule]
