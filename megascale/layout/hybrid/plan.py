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

from megascale.layout.sequence_shard import Spans, TokenSpan

ROW_SHAPES = 16  # numbers of rows that kernels are compiled for; torch compiles a function for 128 at most
ROW_ALIGNMENT = 16  # rows of the tiles of a GEMM's kernel


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

    def padded(self, batch: PlannedBatch, step: int) -> int:
        """Count the tokens of a micro-batch over its ranks, with padding as in `with_padding`."""
        return with_padding(sum(self.lengths[i] for i in batch.sequences), batch.ranks, step, self.max_tokens)

    def rows(self, rank: int, step: int = 1) -> list[int]:
        """Count the rows of every micro-batch of a rank, with padding as in `with_padding`."""
        return [_share(self.padded(own, step), own.ranks, rank - own.first) for own in self.microbatches[rank]]

    @property
    def rings(self) -> tuple[PlannedBatch, ...]:
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


def row_step(max_tokens: int, alignment: int = ROW_ALIGNMENT) -> int:
    """Return the step between the numbers of rows of micro-batches: a multiple of `alignment`, for `ROW_SHAPES` of them
    at most.
    """
    return -(-max_tokens // (ROW_SHAPES * alignment)) * alignment


def with_padding(tokens: int, ranks: int, step: int, max_tokens: int) -> int:
    """Return the tokens of a micro-batch of `ranks` with padding, so that each of them has a multiple of `step` rows,
    or `max_tokens`. A step of 1 adds none.
    """
    share = min(-(-tokens // (ranks * step)) * step, max_tokens)
    return tokens if step == 1 else ranks * share


def _share(length: int, ranks: int, index: int) -> int:
    return length // ranks + (index < length % ranks)
