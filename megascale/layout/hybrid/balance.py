"""Two balances of the sequences that fit a rank, over ranks that may have rings already (ByteScale, Ge et al. 2025).

`balance_by_dp`: equal time for all ranks, sequence by sequence from the longest, each to the rank that is done first
(Graham 1969), packed there. `balance_by_pp`: micro-batches of similar length in a pipeline, for a bubble costs a
pipeline its longest micro-batch (p - 1) times; pipelines with shorter micro-batches have more of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megascale.layout.hybrid.rings import Rings
from megascale.layout.packs import deal, pack_sequences

HALVINGS = 16  # halvings of the interval of makespans in the search of `balance_by_pp`

CAPACITIES = (1.0, 0.5, 0.25)
"""Tokens of a pack that `balance_by_pp` tries, over the limit: smaller packs have a smaller bubble."""

Pack = tuple[int, ...]
Sequences = Sequence[tuple[int, int]]
"""Sequences as (number, length), from the longest to the shortest."""


@dataclass(frozen=True)
class Packs:
    """Packs of sequences by rank, from the one that takes longest, and the seconds of the slowest pipeline."""

    packs: tuple[tuple[Pack, ...], ...]
    makespan: float
    balance: str


def balance_by_dp(short: Sequences, times: Sequence[float], rings: Rings, max_tokens: int, stages: int) -> Packs:
    """Balance sequences to equal times of ranks. `times`: seconds on a rank, by number."""
    held, _ = deal(((times[sequence[0]], sequence) for sequence in short), rings.ready)
    packs = [_by_time(pack_sequences(own, max_tokens), times) for own in held]
    return _packs(packs, rings, stages, "dp")


def balance_by_pp(short: Sequences, times: Sequence[float], rings: Rings, max_tokens: int, stages: int) -> Packs:
    """Balance sequences to equal times of pipelines, each with micro-batches of similar length."""
    longest = short[0][1] if short else 0
    sizes = dict.fromkeys(max(longest, int(max_tokens * share)) for share in CAPACITIES)
    found = [_fill(_by_time(pack_sequences(short, size), times), rings, stages) for size in sizes]
    return min(found, key=lambda packs: packs.makespan)


def _fill(packs: list[tuple[float, Pack]], rings: Rings, stages: int) -> Packs:
    """Give each pipeline the packs that come next in time, as many as end before a makespan, the least that works."""
    seconds = [taken for taken, _ in packs]
    before = [0.0, *accumulate(seconds)]
    order = sorted(range(len(rings.ready)), key=lambda rank: (-rings.longest[rank], rank))
    pipelines = [(rings.ready[rank], rings.longest[rank]) for rank in order]
    low = max(ready + (stages - 1) * longest for ready, longest in pipelines)
    high = low + before[-1] + (stages - 1) * max(seconds, default=0.0)
    ends = _ends(high, seconds, before, pipelines, stages)
    while ends[-1] < len(seconds):  # the sums are rounded
        high *= 1 + 1e-6
        ends = _ends(high, seconds, before, pipelines, stages)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        tried = _ends(middle, seconds, before, pipelines, stages)
        low, high, ends = (low, middle, tried) if tried[-1] == len(seconds) else (middle, high, ends)
    held: list[list[tuple[float, Pack]]] = [[] for _ in order]
    for rank, first, last in zip(order, [0, *ends], ends, strict=False):
        held[rank] = packs[first:last]
    return _packs(held, rings, stages, "pp")


def _ends(
    makespan: float, seconds: list[float], before: list[float], pipelines: list[tuple[float, float]], stages: int
) -> list[int]:
    """Count the packs that the pipelines up to each have taken. `before`: seconds of the packs before each."""
    taken, ends = 0, list[int]()
    for ready, longest in pipelines:
        if taken < len(seconds):
            room = makespan - ready - (stages - 1) * max(longest, seconds[taken])
            taken = max(taken, bisect_right(before, before[taken] + room) - 1)
        ends.append(taken)
    return ends


def _by_time(packs: Sequence[Pack], times: Sequence[float]) -> list[tuple[float, Pack]]:
    """Time packs, and sort them from the one that takes longest."""
    return sorted(((sum([times[i] for i in pack]), pack) for pack in packs), key=lambda pack: (-pack[0], pack[1]))


def _packs(held: Sequence[list[tuple[float, Pack]]], rings: Rings, stages: int, balance: str) -> Packs:
    """Time all pipelines: the micro-batches of each, and the longest of them on every further stage."""
    makespan = max(
        ready + sum(seconds for seconds, _ in own) + (stages - 1) * max(longest, own[0][0] if own else 0.0)
        for ready, longest, own in zip(rings.ready, rings.longest, held, strict=True)
    )
    return Packs(tuple(tuple(pack for _, pack in own) for own in held), makespan, balance)
