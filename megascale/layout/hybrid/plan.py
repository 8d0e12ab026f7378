"""A plan of hybrid data parallelism: the micro-batches of every rank of the dp x cp pool in a step (`HybridPlan`).

A rank trains on packs of whole sequences, and on its part of sequences that a ring of consecutive ranks shares. The
pool has no fixed cp groups: rings have any number of ranks, and other ranks of a step are in no ring. A ring is the
micro-batch of the same index on all of its ranks. A schedule that orders micro-batches by index alone then lets the
ranks of a ring meet without deadlock, on every pipeline stage, though their numbers of micro-batches differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megascale.layout.sequence_shard import Spans, TokenSpan, count


class PlannedBatch(NamedTuple):
    """A micro-batch of ranks `first` to `first` + `ranks` - 1: one sequence shared by a ring, or a pack of whole
    sequences on one rank.
    """

    sequences: tuple[int, ...]
    first: int
    ranks: int = 1


@dataclass(frozen=True)
class HybridPlan:
    """The micro-batches of a step by rank of the pool. `lengths`: of the global batch's sequences, in tokens;
    `max_tokens`: limit of a rank's tokens in a micro-batch; `balance`: how short sequences were balanced, by "dp" or
    "pp"; `makespan`, `bound`: seconds of the slowest pipeline, and a lower bound for all plans, without communication.
    """

    lengths: tuple[int, ...]
    max_tokens: int
    balance: str
    microbatches: tuple[tuple[PlannedBatch, ...], ...]
    makespan: float
    bound: float

    def parts(self, rank: int) -> Iterator[list[tuple[int, Spans]]]:
        """List the sequences of every micro-batch of a rank with the rank's tokens in them."""
        for sequences, first, ranks in self.microbatches[rank]:
            yield [(i, ring_parts(self.lengths[i], ranks)[rank - first]) for i in sequences]

    def tokens(self, rank: int) -> list[int]:
        """Count the tokens of every micro-batch of a rank."""
        return [
            sum(_share(self.lengths[i], ranks, rank - first) for i in sequences)
            for sequences, first, ranks in self.microbatches[rank]
        ]

    @property
    def rings(self) -> tuple[PlannedBatch, ...]:
        """The rings of the step."""
        found = (batch for rank, batches in enumerate(self.microbatches) for batch in batches if batch.first == rank)
        return tuple(batch for batch in found if batch.ranks > 1)


def ring_parts(length: int, ranks: int) -> tuple[Spans, ...]:
    """Split a sequence over a ring: rank i has the i-th piece from the head and the i-th from the tail, for equal work
    under a causal mask. Ranks differ by one token at most.
    """
    if ranks == 1:
        return ((TokenSpan(0, length),),)
    parts, head, tail = list[Spans](), 0, length
    for index in range(ranks):
        share = _share(length, ranks, index)
        parts.append((TokenSpan(head, head + share - share // 2), TokenSpan(tail - share // 2, tail)))
        head, tail = head + share - share // 2, tail - share // 2
    return tuple(parts)


def _share(length: int, ranks: int, index: int) -> int:
    return length // ranks + (index < length % ranks)


def check_plan(plan: HybridPlan) -> None:
    """Check that every token is trained on once, that no micro-batch exceeds the limit, that sequences that fit a rank
    stay on it, and that the ranks of a ring meet at one index.

    Raises: ValueError
    """
    seen = dict[int, list[TokenSpan]]()
    for rank, batches in enumerate(plan.microbatches):
        for index, (batch, held) in enumerate(zip(batches, plan.parts(rank), strict=True)):
            tokens = sum(count(parts) for _, parts in held)
            if not 0 < tokens <= plan.max_tokens:
                raise ValueError(
                    f"rank {rank}: micro-batch {index} has {tokens} tokens, the limit is {plan.max_tokens}"
                )
            for member in range(batch.first, batch.first + batch.ranks):
                if plan.microbatches[member][index] != batch:
                    raise ValueError(f"rank {member}: micro-batch {index} is not the ring of rank {rank}")
            for i, parts in held:
                if batch.ranks > 1 and plan.lengths[i] <= plan.max_tokens:
                    raise ValueError(f"sequence {i} of {plan.lengths[i]} tokens fits a rank, and is in a ring")
                seen.setdefault(i, []).extend(parts)
    for i, length in enumerate(plan.lengths):
        found = sorted(part for part in seen.get(i, []) if part.size)
        ends = [0, *(stop for _, stop in found)]
        if [start for start, _ in found] != ends[:-1] or ends[-1] != length:
            raise ValueError(f"sequence {i}: the parts {found} are not its {length} tokens, each once")
