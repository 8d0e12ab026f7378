"""Combined 1F1B: interleaved 1F1B whose steady forwards and backwards run in pairs, as in Megatron-LM: the exchange of
experts of one is hidden behind the compute of the other.

Time by rank, p = 2 ranks, v = 2 chunks, m = 4 micro-batches; F10&B00: forward on chunk 1 of micro-batch 0 ...
"""

from __future__ import annotations

from itertools import starmap

from megascale.schedule.interleaved import interleave
from megascale.schedule.ir import Overlap, RankSchedule


def combined_1f1b(p: int, v: int, m: int, rank: int) -> RankSchedule:
    """List the actions of `rank` of p, with v chunks per rank, for m micro-batches.

    A pair's parts are of different micro-batches, as there is one forward more ahead than in interleaved 1F1B. The
    bubble is that of interleaved 1F1B, and p + p / v micro-batches are live.
    """
    forwards, backwards, first = interleave(p, v, m)
    warmup = first + 2 * (p - rank - 1) + 1
    pairs = starmap(Overlap, zip(forwards[warmup:], backwards, strict=False))
    return [*forwards[:warmup], *pairs, *backwards[max(0, len(forwards) - warmup) :]]
