"""Check of a compute schedule, such as another package's, before it runs.

Messages and reductions of gradients are those of `schedule.lower`, whose tests prove for any schedule that their order
is equal at both ends and that no waits for devices deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

from megascale.catalog.schedules import SCHEDULES
from megascale.core.errors import ConfigError, Problem
from megascale.layout.stages import Placement
from megascale.schedule.dependencies import RESULTS
from megascale.schedule.global_order import global_order
from megascale.schedule.ir import Action, Kind, Overlap, RankSchedule, Schedule, ScheduleError, each_action, most_live

PASSES = {(Kind.F, *again, *last) for again in ((), (Kind.R,)) for last in ((Kind.B,), (Kind.I, Kind.W))}
"""The actions of a chunk and a micro-batch in their order."""

KINDS = Kind.F, Kind.B, Kind.I, Kind.W, Kind.R

PAIRS = {(Kind.F, Kind.B), (Kind.F, Kind.I)}


def check_schedule(compute: Schedule, placement: Placement, m: int, facts: Mapping[str, Any] | None = None) -> None:
    """Check that every rank runs every micro-batch on every chunk of its path forward, then backward; that the
    gradients of weights are summed in the order of the micro-batches, as the bits of all schedules are equal; that the
    parts of an Overlap do not need each other; that ranks do not wait for each other; and the `facts` of a card: that
    no more micro-batches than its peak are live on a rank, summed over its chunks, and that it tells of split backwards
    and pairs, as plans ask for them.

    Raises: ScheduleError
    """
    p, v = placement.p, placement.v
    if len(compute) != p:
        raise ScheduleError(f"lists of actions for {len(compute)} ranks, not {p}")
    for rank, order in enumerate(compute):
        check_entries(order, rank)
        check_passes(order, rank, placement, m)
        summed = [0] * v
        for action in (action for action in each_action(order) if Kind.W in RESULTS[action.kind]):
            if action.microbatch < summed[action.chunk]:
                raise ScheduleError(f"rank {rank}: {action} comes after that of micro-batch {summed[action.chunk]}")
            summed[action.chunk] = action.microbatch
    global_order([[order] for order in compute], placement)
    if facts is None:
        return
    for rank, order in enumerate(compute if facts["peak"] else ()):
        if (live := most_live(order, [1] * v)) > (peak := facts["peak"](p, v, m)):
            raise ScheduleError(f"rank {rank} has {live} micro-batches live, more than {peak}")
    entries = list(chain(*compute))
    found = {"split": any(action.kind is Kind.W for action in each_action(entries)),
             "pairs": any(isinstance(entry, Overlap) for entry in entries)}  # fmt: skip
    if missing := [fact for fact in found if found[fact] and not facts[fact]]:
        raise ScheduleError(f"its card has not the fact {missing[0]} = True")


def check_entries(order: RankSchedule, rank: int) -> None:
    """Check that a rank's schedule is a list of actions with a Kind and whole numbers, and of pairs of them.

    Raises: ScheduleError
    """
    found = {type(each) for each in each_action(order)} - {Action} if isinstance(order, list) else {type(order)}
    if found:
        what = ", ".join(sorted(each.__name__ for each in found))
        raise ScheduleError(f"rank {rank}: {what}, not a list of Action and Overlap (megascale.schedule.ir)")
    for action in each_action(order):
        if tuple(map(type, action)) != (Kind, int, int) or action.kind not in KINDS:
            raise ScheduleError(f"rank {rank}: {action!r} has no Kind of {', '.join(KINDS)}, or no whole numbers")


def check_passes(order: RankSchedule, rank: int, placement: Placement, m: int) -> None:
    """Check that a rank runs every (chunk, micro-batch) forward, then backward, in pairs of different micro-batches.
    A backward is one action or two.

    Raises: ScheduleError
    """
    for pair in (entry for entry in order if isinstance(entry, Overlap)):
        if (pair.forward.kind, pair.backward.kind) not in PAIRS or pair.forward.microbatch == pair.backward.microbatch:
            raise ScheduleError(f"rank {rank}: {pair} is no forward with a backward of another micro-batch")
    chunks, kinds = range(placement.v), dict[tuple[int, int], tuple[Kind, ...]]()
    kinds |= {(c, i): () for i in range(m) for c in chunks if placement.stage(rank, c) in placement.path(i)}
    for action in each_action(order):
        key = action.chunk, action.microbatch
        if key not in kinds:
            raise ScheduleError(f"rank {rank}: {action} is none of {placement.v} chunks and {m} micro-batches on them")
        kinds[key] += (action.kind,)
    for (chunk, i), found in kinds.items():
        if found not in PASSES:
            actions = " ".join(str(Action(kind, chunk, i)) for kind in found) or "nothing"
            raise ScheduleError(
                f"rank {rank} runs {actions} for chunk {chunk} and micro-batch {i}, not F, then B or I and W"
            )


@contextmanager
def as_problem(name: str) -> Iterator[None]:
    """Raise ConfigError for whatever another package's schedule raises, and for what is wrong with its actions."""
    card = SCHEDULES[name]
    try:
        yield
    except Exception as error:
        if card.built_in:
            raise
        message = str(error) if isinstance(error, ScheduleError) else f"{type(error).__name__}: {error}"
        hint = "docs/extending/schedule.md says what a schedule takes and returns"
        raise ConfigError([Problem(card.target, "parallel.schedule", message, hint)]) from error
