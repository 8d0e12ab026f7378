"""What a pipeline rank does, as data: a list of actions.

A compute schedule has forwards and backwards only. `megascale.schedule.lower` adds the communication; the executor runs
the result, the simulator costs it, tests prove properties of it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple


class Kind(enum.StrEnum):
    """What an action does. SEND and RECV move a boundary activation (F) or its gradient (B)."""

    F = "F"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    GATHER = "GATHER"  # the chunk's weights must be complete from here on
    REDUCE = "REDUCE"  # the chunk's gradients of these micro-batches are complete: reduce them over data parallelism


class Action(NamedTuple):
    """One action on chunk `chunk` of a rank for micro-batch `microbatch`.

    SEND_F sends the output of (chunk, microbatch) to the next virtual stage, RECV_F receives its input; SEND_B sends
    the gradient of its input to the stage before, RECV_B receives the gradient of its output. GATHER and REDUCE concern
    the whole chunk; their micro-batch is the one they stand beside.
    """

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.microbatch}"


Order = list[Action]
"""The actions of one rank."""

Schedule = list[Order]
"""The actions of each pipeline rank."""

OrderOf = Callable[[int, int, int, int], Order]
"""A schedule: from p stages, v chunks on each, m micro-batches and a rank to this rank's compute actions."""


def forward(chunk: int, microbatch: int) -> Action:
    """The forward of a micro-batch on a chunk."""
    return Action(Kind.F, chunk, microbatch)


def backward(chunk: int, microbatch: int) -> Action:
    """The backward of a micro-batch on a chunk."""
    return Action(Kind.B, chunk, microbatch)


def schedule(order: OrderOf, p: int, v: int, m: int) -> Schedule:
    """List the compute actions of all p ranks."""
    return [order(p, v, m, rank) for rank in range(p)]


def forwards_only(schedule: Schedule) -> Schedule:
    """The forwards of a compute schedule: an evaluation."""
    return [[action for action in order if action.kind is Kind.F] for order in schedule]
