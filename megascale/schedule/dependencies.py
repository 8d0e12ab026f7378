"""Dependencies of compute actions: the one relation from which lowering, executor, simulator and checks derive order
and messages. It is the same for every micro-batch, where before and after are along its path.

    F    the output of the stage before
    R    the forward of its own stage
    B, I    the forward of its own stage, and the gradient of the input of the stage after
    W    the input gradient of its own stage

With vocabulary parallelism, where "all" is the same pass of all ranks, the last of which leaves the result:

    VS   the output of the last stage
    VT   all VS
    B, I of the last stage    also all VT, or all VS with a single barrier
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from megascale.layout.stages import Placement
from megascale.schedule.ir import SERVED, Action, Entry, Kind, parts

Result = tuple[Kind, int, int]
"""The result of an action: kind, virtual stage, micro-batch. The kinds are F for the output of a stage, I for the
gradient of its input, W for the gradients of its weights, R for a recomputed forward; and VS and VT of the vocabulary.
"""

RESULTS = {kind: (kind,) for kind in (Kind.F, Kind.R, Kind.I, Kind.W, Kind.VS, Kind.VT)} | {Kind.B: (Kind.I, Kind.W)}
OWN = {Kind.R: Kind.F, Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}
"""The result of its own stage that an action needs."""

TAKEN = {Kind.F: (Kind.F, -1), Kind.B: (Kind.I, 1), Kind.I: (Kind.I, 1)}
"""The result that an action takes from another stage, and that stage relative to its own."""


def results(entry: Entry, rank: int, placement: Placement) -> list[Result]:
    """List what a compute action, or a pair of them, leaves."""
    return [
        (result, placement.stage(rank, chunk), microbatch)
        for kind, chunk, microbatch in parts(entry)
        for result in RESULTS[kind]
    ]


def dependencies(entry: Entry, rank: int, placement: Placement) -> list[Result]:
    """List what a compute action, or a pair of them, needs."""
    return [
        (result, stage, microbatch)
        for kind, chunk, microbatch in parts(entry)
        for result, stage in _around(kind, rank, chunk, microbatch % len(placement.paths), placement)[0]
    ]


class Neighbours(NamedTuple):
    """Virtual stages on other ranks: the `source` of the message that an action waits for, and the `target` of the
    message with its result; None without a message.
    """

    source: int | None
    target: int | None


def neighbours(action: Action, rank: int, placement: Placement) -> Neighbours:
    """Find the stages that exchange messages with a compute action of a rank, or with that of a SEND or RECV."""
    kind, chunk, microbatch = action
    return _around(SERVED.get(kind, kind), rank, chunk, microbatch % len(placement.paths), placement)[1]


@lru_cache(1 << 14)
def _around(
    kind: Kind, rank: int, chunk: int, path: int, placement: Placement
) -> tuple[list[tuple[Kind, int]], Neighbours]:
    """Find the results that an action needs, kinds and stages, and its neighbours."""
    stage = placement.stage(rank, chunk)
    taken, step = TAKEN.get(kind, (kind, 0))
    before, after = (placement.along_path(stage, way, path) if step else None for way in (step, -step))
    needs = [(OWN[kind], stage)] if kind in OWN else []
    if kind is Kind.VS:
        needs = [(Kind.F, placement.count - 1)]
    elif kind is Kind.VT or (placement.barriers and stage == placement.count - 1 and kind in (Kind.B, Kind.I)):
        needs.append((Kind.VT if placement.barriers == 2 and kind is not Kind.VT else Kind.VS, placement.count))
    if before is not None:
        needs.append((taken, before))
    far = (None if at is None or placement.places[at][0] == rank else at for at in (before, after))
    return needs, Neighbours(*far)
