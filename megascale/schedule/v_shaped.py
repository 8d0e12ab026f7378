"""V-shaped schedules: rank r of p has stages r and 2p - 1 - r, so that the loss is on the rank with the first stage.

A schedule is phases, (times, actions), in turn: F0 is the next forward of chunk 0; F0&B1 an Overlap; W1 the oldest of
the weights' gradients of chunk 1 that are left, W of any chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megascale.schedule.ir import Action, Kind, Overlap, RankSchedule

Phase = tuple[int, str]


def in_phases(phases: Iterable[Phase], m: int) -> RankSchedule:
    """List the actions of phases for m micro-batches; actions of further micro-batches are left out."""
    following, left, order = Counter[tuple[bool, int]](), list[Action](), RankSchedule()
    for name in (name for times, names in phases for name in times * names.split()):
        if name[0] == Kind.W:
            actions = [next(each for each in left if name[1:] in ("", str(each.chunk)))]
            left.remove(actions[0])
        else:
            actions = []
            for part in name.split("&"):
                kind, chunk = Kind(part[0]), int(part[1])
                actions.append(Action(kind, chunk, following[kind is Kind.F, chunk]))
                following[kind is Kind.F, chunk] += 1
            left += [action._replace(kind=Kind.W) for action in actions if action.kind is Kind.I]
        match [action for action in actions if action.microbatch < m]:
            case [action]:
                order.append(action)
            case [forward, backward]:
                order.append(Overlap(forward, backward))
    return order


def zb_v(p: int, v: int, m: int, rank: int) -> RankSchedule:
    """List the actions of `rank` of p for m micro-batches; v is 2 (Qi et al. 2024, 2405.15362).

    With equal times F, I, W of a rank the bubble is (p - 1) F / 2, and at most p micro-batches are live on every rank.
    """
    after, steady = p - rank - 1, max(0, m - 2 * p + 1)
    phases = [
        (2 * after + 1, "F0"), (rank, "F1 F0"), (after + 1, "F1 I1 W1"), (steady + rank, "F0 I0 W0 F1 I1 W1"),
        (after, "I0 W0 F1 I1 W1"), (rank, "I0 I1"), (after + 1, "I0 W0"), (rank, "W1"), (rank, "W0"),
    ]  # fmt: skip
    return in_phases(phases, m)


def dualpipev(p: int, v: int, m: int, rank: int) -> RankSchedule:
    """List the actions of `rank` of p for m micro-batches; v is 2 (DeepSeek-AI 2024, 2412.19437, on a V).

    In its steady phase forwards and backwards of different micro-batches are paired: the exchange of experts of one is
    hidden behind the compute of the other. With times F&B of a pair, B and W of a rank the bubble is about
    (p - 1)(F&B + B - 3 W) / 2, and p + 1/2 micro-batches are live.
    """
    after, steady, half = p - rank - 1, max(0, m - 2 * p), (rank + 1) // 2
    first = "F0&B1 F1&B0" if after else "F0 B1 F1&B0"
    phases = [
        (2 * after, "F0"), (rank + 1, "F0 F1"), (after, "I1 W F1"), (1, first), (steady + rank, "F0&B1 F1&B0"),
        (after, "B1 F1&B0"), (half, "B1 B0"), (1, "I1 I0" if rank % 2 else "B1 I0"), (rank - half, "I1 I0"),
        (after, "W I0"), (rank + 1, "W"),
    ]  # fmt: skip
    return in_phases(phases, m)
