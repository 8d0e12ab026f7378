"""State-aware 1F1B: 1F1B over chunks of sequences (ChunkFlow, Yuan et al. 2025; sub-sequences in SPPO, Chen et al.).

The micro-batches are chunks of equally many tokens. A long sequence is n dependent chunks, n micro-batches in a row:
forwards ascend, as a chunk reads the keys and values of the chunks before; backwards descend, as a chunk needs the
gradients of its keys and values from the chunks after. Only the last `keep` chunks of a sequence keep their
activations. Other chunks keep their input, and are recomputed before their backward.

Time by rank for p = 4, a sequence of two chunks, 2 and 3, after two chunks of short sequences, with keep = 1:

    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- .  B1--- .  .  .  .  B3--- R2 B2---
    rank 1  .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  .  .  .  B3--- R2 B2--- .  .
    rank 2  .  .  F0 F1 .  .  B0--- F2 B1--- F3 .  .  .  B3--- R2 B2--- .  .  .  .
    rank 3  .  .  .  F0 B0--- F1 B1--- F2 .  .  F3 B3--- R2 B2--- .  .  .  .  .  .

With the sequence first, the ranks have their forwards for the time that its gradient takes through the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from megascale.schedule.ir import Action, Kind, RankSchedule, Schedule, backward, forward


def state_aware_1f1b(p: int, sequences: Sequence[int], keep: int, rank: int) -> RankSchedule:
    """List the actions of `rank` of p. `sequences`: the chunks of every sequence, 1 for a chunk of short sequences.

    The last rank runs the forwards of a sequence's chunks before the first of its backwards; rank r is p - r - 1
    forwards ahead of the last rank, as in 1F1B. At most keep + p - r - 1 chunks have their activations, whatever the
    longest sequence.

    Raises: ValueError for keep < 1
    """
    if keep < 1:
        raise ValueError(f"state-aware 1F1B keeps the activations of one chunk or more, not {keep}")
    total, order, started = sum(sequences), RankSchedule(), 0
    for end, chunks in zip(accumulate(sequences), sequences, strict=True):
        for i in reversed(range(end - chunks, end)):
            # without dependent chunks i + 1 forwards come before the backward of i on the last rank: 1F1B
            until = min(total, end + p - rank - 1)
            order += [forward(0, ahead) for ahead in range(started, until)]
            started = max(started, until)
            order += [Action(Kind.R, 0, i)] if i < end - keep else []
            order.append(backward(0, i))
    return order


def build_state_aware(p: int, sequences: Sequence[int], keep: int) -> Schedule:
    """List the compute actions of all p ranks."""
    return [state_aware_1f1b(p, sequences, keep, rank) for rank in range(p)]
