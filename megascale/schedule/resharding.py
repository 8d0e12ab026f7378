"""When the weights of a chunk are gathered and released, if they are fully sharded (`parallel.reshard`).

    keep        gathered before the first action of the step, released after the last
    microbatch  gathered before every run of actions of the chunk, released after it
    forward     gathered unit by unit for every action, and released behind it; announced an action ahead, so that the
                first unit arrives during the action before

A backward needs weights for the gradient of its input, and W needs none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

from megascale.schedule.ir import Action, Kind, RankSchedule, parts

Reshard = Literal["keep", "microbatch", "forward"]

GATHERS = {Kind.F: Kind.GATHER_F, Kind.R: Kind.GATHER_F, Kind.B: Kind.GATHER_B, Kind.I: Kind.GATHER_B}
"""The gather before an action that needs weights."""

Placed = defaultdict[int, list[Action]]
"""Actions by the entry of a rank's order that they come before or after."""

Use = tuple[int, Action]
"""An action that needs weights, with the number of its entry."""


def place_gathers(order: RankSchedule, reshard: Reshard) -> tuple[Placed, Placed]:
    """Place the gathers of a rank before entries of its order, and the releases after entries."""
    uses = [(at, action) for at, entry in enumerate(order) for action in parts(entry) if action.kind in GATHERS]
    before, after, ahead = Placed(list), Placed(list), 0
    for run in _runs(uses, reshard):
        (first, needs), (last, ends) = run[0], run[-1]
        before[ahead if reshard == "forward" else first].append(needs._replace(kind=GATHERS[needs.kind]))
        after[last].append(ends._replace(kind=Kind.RELEASE))
        ahead = first
    return before, after


def _runs(uses: Sequence[Use], reshard: Reshard) -> Iterator[list[Use]]:
    """Yield the uses of a chunk that share a gather."""

    def chunk(use: Use) -> int:
        return use[1].chunk

    if reshard == "forward":
        yield from ([use] for use in uses)
    else:
        runs = groupby(sorted(uses, key=chunk) if reshard == "keep" else uses, key=chunk)
        yield from (list(run) for _, run in runs)
