"""V-Half and V-Min: the V-shaped schedules with a half and a third of the activations of 1F1B (Qi et al. 2024, Pipeline
parallelism with controllable memory).

A micro-batch is a building block: the times of its F0, F1, I1 and I0 on every rank. Blocks repeat every 6 times; the
weights' gradients take the times that are left. The longer a block, the more micro-batches are live. Then every rank
runs what is ready ahead of its turn, unless more would ever be live than in the blocks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from megascale.layout.stages import v_shaped
from megascale.schedule.dependencies import Result, dependencies, results
from megascale.schedule.ir import LIVE, Action, Kind, RankSchedule, forward, most_live

PERIOD = 6


class BuildingBlock(NamedTuple):
    """Times of a micro-batch on rank r, of F0, F1, I1 and I0: `starts` + `hops` r."""

    starts: tuple[int, int, int, int]
    hops: tuple[int, int, int, int]


def half_block(p: int) -> BuildingBlock:
    """Return the block of V-Half: forwards go down in twice the time in which they come back."""
    wait = 0 if p % 2 else 3
    return BuildingBlock((0, 3 * p - 2, 3 * p + wait - 1, 6 * p + wait - 2), (2, -1, 2, -1))


def min_block(p: int) -> BuildingBlock:
    """Return the block of V-Min, the shortest."""
    wait = 0 if p % 3 else 2
    return BuildingBlock((0, 2 * p - 1, 2 * p + wait, 4 * p + wait - 1), (1, -1, 1, -1))


def v_half(p: int, v: int, m: int, rank: int) -> RankSchedule:
    """List the actions of `rank` of p for m micro-batches; v is 2.

    With equal times F, I, W of a rank the bubble is less than half of 1F1B's, 3 (p - 1) F / 2, and at most 1 + p // 2
    micro-batches are live.
    """
    return _squeezed_and_repeated(half_block(p), p, m, rank)


def v_min(p: int, v: int, m: int, rank: int) -> RankSchedule:
    """List the actions of `rank` of p for m micro-batches; v is 2.

    With equal times F, I, W of a rank the bubble is at most two thirds of 1F1B's, 2 (p - 1) F, and at most (p + 4) // 3
    micro-batches are live.
    """
    return _squeezed_and_repeated(min_block(p), p, m, rank)


def _squeezed_and_repeated(block: BuildingBlock, p: int, m: int, rank: int) -> RankSchedule:
    few = min(m, 2 * p + 4)  # with a steady micro-batch, if m is larger
    order = squeezed(block, p, few)[rank]
    return [*(repeated(order, p, m - few) if m > few else order)]


def repeated(order: list[Action], p: int, more: int) -> list[Action]:
    """Repeat the steady micro-batch of a rank's order for `more` micro-batches."""
    start, end = order.index(Action(Kind.I, 0, p)), order.index(Action(Kind.I, 0, p + 1))
    copies = [(i, action) for i in range(more) for action in order[start:end]]
    later = [(0, action) for action in order[:start]] + copies + [(more, action) for action in order[start:]]
    return [action._replace(microbatch=action.microbatch + i) for i, action in later]


def in_blocks(block: BuildingBlock, m: int, rank: int) -> list[Action]:
    """Order the actions of a rank by the times of their blocks, the oldest W in every time that is left."""
    passes = forward(0, 0), forward(1, 0), Action(Kind.I, 1, 0), Action(Kind.I, 0, 0)
    at = {
        start + hop * rank + PERIOD * i: action._replace(microbatch=i)
        for start, hop, action in zip(*block, passes, strict=True)
        for i in range(m)
    }
    order, left = list[Action](), list[Action]()
    for time in range(max(at) + 1):
        if (action := at.get(time)) is not None:
            order.append(action)
            left += [action._replace(kind=Kind.W)] if action.kind is Kind.I else []
        elif left:
            order.append(left.pop(0))
    return order + left


@lru_cache(8)
def squeezed(block: BuildingBlock, p: int, m: int) -> list[list[Action]]:
    """Run the blocks of all ranks in unit times: a rank takes the first action of its order that is ready, a W only
    without another, and a forward only if never more activations are live than in the blocks.
    """
    placement, schedule = v_shaped(p, 2), [list[Action]() for _ in range(p)]
    orders = [in_blocks(block, m, rank) for rank in range(p)]
    most = max(most_live(order, (1, 1)) for order in orders)
    left = [[(action, dependencies(action, rank, placement)) for action in order] for rank, order in enumerate(orders)]
    live, done = [0] * p, set[Result]()
    while any(left):
        ended = list[Result]()
        for rank, order in enumerate(left):
            if (at := _next(order, live[rank], most, done)) is not None:
                action, _ = order.pop(at)
                schedule[rank].append(action)
                live[rank] += LIVE.get(action.kind, 0)
                ended += results(action, rank, placement)
        done.update(ended)
    return schedule


def _next(order: list[tuple[Action, list[Result]]], live: int, most: int, done: set[Result]) -> int | None:
    """Find the action of a rank's order that is next, None while none can run."""
    passed, weights, high = set[tuple[Kind, int]](), None, live  # high: the most that are live up to here
    for at, ((kind, chunk, _), needs) in enumerate(order):
        if (kind, chunk) not in passed and (kind is not Kind.F or high < most) and done.issuperset(needs):
            if kind is not Kind.W:
                return at
            weights = at if weights is None else weights
        passed.add((kind, chunk))
        live += LIVE.get(kind, 0)
        high = max(high, live)
        if len(passed) == 2 * 3:  # F, I and W of both chunks
            break
    return weights
