"""Intermediate representation of pipeline schedules: a list of actions per rank.

A compute schedule has compute actions only. `megascale.schedule.lower` adds communication; the executor runs the
lowered schedule, the simulator estimates its time, tests prove its properties.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import mul
from typing import NamedTuple

from megascale.core.errors import Exit, MegascaleError
from megascale.record.label import BACKWARD, FORWARD


class ScheduleError(MegascaleError):
    """A schedule that deadlocks or is incomplete, or that the executor cannot run."""

    exit_status = Exit.CONFIG


class Kind(enum.StrEnum):
    """Kinds of actions. SEND and RECV move an activation between stages (F) or its gradient (B)."""

    F = "F"
    B = "B"  # I, then W
    I = "I"  # noqa: E741  the gradient of the stage's input
    W = "W"  # the gradients of the stage's weights
    R = "R"  # recompute a forward whose activations were dropped, from its saved input
    VS = "VS"  # logits of the rank's rows of the vocabulary, and their statistics
    VT = "VT"  # the loss, and the gradients of the rows
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_PARAMS = "WAIT_PARAMS"  # wait for the all-gather of the chunk's weights
    GATHER_F = "GATHER_F"  # gather the chunk's sharded weights, for a forward first
    GATHER_B = "GATHER_B"  # the same for a backward first
    RELEASE = "RELEASE"  # the chunk's gathered weights are not needed until the next gather
    REDUCE = "REDUCE"  # start the data-parallel reduction of the chunk's accumulated gradients
    EMBED = "EMBED"  # sum the embeddings of the ranks' rows, for the first stage
    EMBED_GRAD = "EMBED_GRAD"  # spread the gradient of that sum, and add it to the rows
    HIDDEN = "HIDDEN"  # spread the output of the last stage
    STATS = "STATS"  # exchange the statistics of VS
    HIDDEN_GRAD = "HIDDEN_GRAD"  # sum the gradient of the last stage's output


class Compute(NamedTuple):
    """A kind of compute action: its `name` in words, the pass of the network that it `runs`, and the `phase` of a step
    that its time belongs to, both FORWARD or BACKWARD.
    """

    name: str
    runs: str
    phase: str


COMPUTE_KINDS: Mapping[str, Compute] = {
    Kind.F: Compute("forward", FORWARD, FORWARD),
    Kind.R: Compute("recompute", FORWARD, BACKWARD),
    Kind.B: Compute("backward", BACKWARD, BACKWARD),
    Kind.I: Compute("input_gradient", BACKWARD, BACKWARD),
    Kind.W: Compute("weight_gradient", BACKWARD, BACKWARD),
    Kind.VS: Compute("logits", FORWARD, FORWARD),
    Kind.VT: Compute("vocabulary_gradient", BACKWARD, BACKWARD),
}
"""The compute actions by kind, which is also the name of their events."""


SERVED = {Kind.SEND_F: Kind.F, Kind.RECV_F: Kind.F, Kind.SEND_B: Kind.B, Kind.RECV_B: Kind.B}
"""The compute action whose result a SEND sends, or that a RECV receives for."""


class Action(NamedTuple):
    """An action of a rank on a model chunk and a micro-batch.

    SEND_F sends the output of (chunk, microbatch) to the next virtual stage, RECV_F receives its input; SEND_B sends
    the gradient of its input to the previous stage, RECV_B receives the gradient of its output. WAIT_PARAMS, GATHER,
    RELEASE and REDUCE apply to the whole chunk; their micro-batch is that of the action that they serve. Passes and
    exchanges of vocabulary parallelism have its chunk, and all ranks run them (`schedule.shared_vocabulary`).
    """

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.microbatch}"


class Overlap(NamedTuple):
    """A forward and a backward, or input gradient, of another micro-batch, whose segments a rank runs in turn: the
    messages of experts of one are hidden behind the compute of the other.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward}&{self.backward}"


Entry = Action | Overlap

RankSchedule = list[Entry]
"""The actions of one rank, some of them in pairs."""


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


def parts(entry: Entry) -> tuple[Action, ...]:
    """Return an action, or the two of an Overlap."""
    return (entry.forward, entry.backward) if isinstance(entry, Overlap) else (entry,)


def each_action(order: Iterable[Entry]) -> Iterator[Action]:
    """Yield the actions of a rank one by one, of an Overlap the forward first."""
    return chain.from_iterable(map(parts, order))


def build_schedule(order: ScheduleFn, p: int, v: int, m: int) -> Schedule:
    """List the compute actions of all p ranks."""
    return [order(p, v, m, rank) for rank in range(p)]


LIVE = {Kind.F: 1, Kind.R: 1, Kind.B: -1, Kind.W: -1}
"""How many more micro-batches are live after an action."""


def most_live(order: Sequence[Entry], sizes: Sequence[int]) -> int:
    """Measure the most that is live, from forward to last gradient. `sizes`: of a micro-batch, by chunk."""
    return max((sum(map(mul, counts, sizes)) for counts in live_counts(order, len(sizes))), default=0)


def live_counts(order: Sequence[Entry], chunks: int) -> set[tuple[int, ...]]:
    """Count the micro-batches that are live at a time, by chunk. A forward that is recomputed keeps nothing."""
    dropped = {action[1:] for action in each_action(order) if action.kind is Kind.R}
    live, found = [0] * chunks, set[tuple[int, ...]]()
    for kind, chunk, microbatch in each_action(order):
        if kind in LIVE and not (kind is Kind.F and (chunk, microbatch) in dropped):
            live[chunk] += LIVE[kind]
            found.add(tuple(live))
    return found


def weights_at_once(order: RankSchedule, chunks: Collection[int]) -> RankSchedule:
    """Run every W of `chunks` directly after its I: between them a recomputed chunk has all that it does not save."""
    if not chunks:
        return order
    moved = RankSchedule()
    for entry in order:
        action = parts(entry)[-1]
        early = action.chunk in chunks
        if not (early and action.kind is Kind.W):
            moved.append(entry)
        if early and action.kind is Kind.I:
            moved.append(action._replace(kind=Kind.W))
    return moved


def forwards_only(schedule: Schedule) -> Schedule:
    """Drop the backwards of a compute schedule, for an evaluation."""
    return [[action for action in each_action(order) if action.kind is Kind.F] for order in schedule]
