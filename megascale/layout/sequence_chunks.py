"""Chunks of sequences as micro-batches (`cut_chunks`): long sequences in dependent chunks, short ones packed.

As in ChunkFlow (Yuan et al. 2025) a sequence longer than a chunk is cut into dependent chunks, which share a store of
keys and values, and short sequences are packed into few chunks. As in SPPO (Chen et al. 2025) chunks may be cut for
equal work in place of equal tokens (`cut_evenly`): the tokens of a later chunk attend to all chunks before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megascale.layout.hybrid.sequence_work import SequenceWork
from megascale.layout.packs import pack_sequences


class SequencePiece(NamedTuple):
    """Tokens [start, stop) of a sequence of the batch."""

    sequence: int
    start: int
    stop: int


SequenceChunk = tuple[SequencePiece, ...]
"""A micro-batch: a piece of a long sequence, or whole short sequences."""


def cut_chunks(
    lengths: Sequence[int], chunk_tokens: int, work: SequenceWork | None = None
) -> list[tuple[SequenceChunk, ...]]:
    """Cut and pack a batch's sequences to chunks of at most `chunk_tokens`; chunks of an entry depend on each other.

    The longest sequence comes first: its backward leaves the pipeline most time for the forwards of others. Last come
    packs, an entry each. `work`: cut long sequences to chunks of equal work.
    """
    ordered = sorted(enumerate(lengths), key=lambda sequence: (-sequence[1], sequence[0]))
    chunks = list[tuple[SequenceChunk, ...]]()
    short = list[tuple[int, int]]()
    for number, length in ordered:
        if length <= chunk_tokens:
            short.append((number, length))
            continue
        ends = cut_evenly(length, chunk_tokens, work)
        pieces = zip([0, *ends], ends, strict=False)
        chunks.append(tuple((SequencePiece(number, start, stop),) for start, stop in pieces))
    packs = pack_sequences(short, chunk_tokens)
    return chunks + [(tuple(SequencePiece(i, 0, lengths[i]) for i in pack),) for pack in packs]


def cut_evenly(length: int, chunk_tokens: int, work: SequenceWork | None = None) -> list[int]:
    """Cut a sequence into the fewest chunks of at most `chunk_tokens`: of equal tokens, or of equal `work`. Returns the
    ends of chunks.
    """
    if work is None or not work.quadratic:
        count = math.ceil(length / chunk_tokens)
        return [-(-length * (index + 1) // count) for index in range(count)]
    # the first chunk has most tokens, for they attend to fewest
    most, total = work.whole(chunk_tokens), work.whole(length)
    count = math.ceil(total / most - 1e-9)
    ends = [_tokens(total * (index + 1) / count, work) for index in range(count - 1)]
    return [*ends, length]


def _tokens(seconds: float, work: SequenceWork) -> int:
    """The tokens of a sequence that take `seconds`, the inverse of `SequenceWork.whole`."""
    a, b = work.linear, work.quadratic
    return int((math.sqrt(a * a + 4 * b * seconds) - a) / (2 * b))
