"""V-shaped schedules: rank r of p has stages r and 2p - 1 - r, so that the loss is on the rank with the first stage.

Each is phases, (times, actions) in turn: F0 is the next forward of chunk 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megascale.schedule.ir import Action, Kind, RankSchedule

Phase = tuple[int, str]


def in_phases(phases: Iterable[Phase], m: int) -> RankSchedule:
    """List the actions of phases for m micro-batches; actions of further micro-batches are left out."""
    following, order = Counter[str](), RankSchedule()
    for name in (name for times, names in phases for name in times * names.split()):
        if following[name] < m:
            order.append(Action(Kind(name[0]), int(name[1]), following[name]))
        following[name] += 1
    return order


def zb_v(p: int, v: int, m: int, rank: int) -> RankSchedule:
    """List the actions of `rank` of p for m micro-batches; v must be 2 (Qi et al. 2024, 2405.15362).

    With equal times F, I, W of a rank the bubble is (p - 1) F / 2, and at most p micro-batches are live on every rank.

    Raises: ValueError for v != 2
    """
    if v != 2:
        raise ValueError(f"zb_v has two model chunks per rank, not {v}")
    after, steady = p - rank - 1, max(0, m - 2 * p + 1)
    phases = [
        (2 * after + 1, "F0"), (rank, "F1 F0"), (after + 1, "F1 I1 W1"), (steady + rank, "F0 I0 W0 F1 I1 W1"),
        (after, "I0 W0 F1 I1 W1"), (rank, "I0 I1"), (after + 1, "I0 W0"), (rank, "W1"), (rank, "W0"),
    ]  # fmt: skip
    return in_phases(phases, m)
