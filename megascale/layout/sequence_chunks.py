"""Chunks of sequences as micro-batches (`cut_chunks`): long sequences in dependent chunks, short ones packed.

As in ChunkFlow (Yuan et al. 2025) a sequence longer than a chunk is cut into dependent chunks, which share a store of
keys and values, and short sequences are packed into few chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from megascale.layout.packs import pack_sequences


class SequencePiece(NamedTuple):
    """Tokens [start, stop) of a sequence of the batch."""

    sequence: int
    start: int
    stop: int


SequenceChunk = tuple[SequencePiece, ...]
"""A micro-batch: a piece of a long sequence, or whole short sequences."""


def cut_chunks(lengths: Sequence[int], chunk_tokens: int) -> list[tuple[SequenceChunk, ...]]:
    """Cut and pack a batch's sequences to chunks of at most `chunk_tokens`; chunks of an entry depend on each other.

    The longest sequence comes first: its backward leaves the pipeline most time for the forwards of others. It is cut
    into the fewest chunks, of equal tokens. Last come packs, an entry each.
    """
    ordered = sorted(enumerate(lengths), key=lambda sequence: (-sequence[1], sequence[0]))
    chunks, short = list[tuple[SequenceChunk, ...]](), list[tuple[int, int]]()
    for number, length in ordered:
        if length <= chunk_tokens:
            short.append((number, length))
            continue
        count = math.ceil(length / chunk_tokens)
        ends = [-(-length * index // count) for index in range(count + 1)]
        chunks.append(tuple((SequencePiece(number, start, stop),) for start, stop in pairwise(ends)))
    packs = pack_sequences(short, chunk_tokens)
    return chunks + [(tuple(SequencePiece(i, 0, lengths[i]) for i in pack),) for pack in packs]
