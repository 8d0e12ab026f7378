"""When the weights of a chunk are gathered and released, if they are fully sharded (`parallel.reshard`).

    keep        gathered before the first action of the step, released after the last
    microbatch  gathered before every run of actions of the chunk, released after it
    forward     gathered unit by unit for every action, and released behind it; announced an action ahead, so that the
                first unit arrives during the action before

A backward needs weights for the gradient of its input, and W needs none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Literal

from megascale.schedule.ir import Action, Kind, RankSchedule, each_action, parts

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


def count_gathers(order: RankSchedule, reshard: Reshard, chunk: int, units: int) -> list[int]:
    """Count the gathers of each of a chunk's units: unit by unit, uses in a row share one."""
    uses = [use for use in enumerate(each_action(order)) if use[1].kind in GATHERS]
    if reshard != "forward":
        return [sum(run[0][1].chunk == chunk for run in _runs(uses, reshard))] * units
    kinds = [GATHERS[action.kind] if action.chunk == chunk else None for _, action in uses]
    counts, pairs = [len(kinds) - kinds.count(None)] * units, Counter(pairwise(kinds))
    counts[0] -= pairs[Kind.GATHER_B, Kind.GATHER_F]
    counts[-1] -= pairs[Kind.GATHER_F, Kind.GATHER_B]
    if units == 1:
        counts[0] -= pairs[Kind.GATHER_F, Kind.GATHER_F] + pairs[Kind.GATHER_B, Kind.GATHER_B]
    return counts


def _runs(uses: Sequence[Use], reshard: Reshard) -> Iterator[list[Use]]:
    """Yield the uses of a chunk that share a gather."""
    in_order = sorted(uses, key=lambda use: use[1].chunk) if reshard == "keep" else uses
    for _, run in groupby(in_order, key=lambda use: use if reshard == "forward" else use[1].chunk):
        yield list(run)
