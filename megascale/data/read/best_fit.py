"""The samples of an epoch with `data.packing = "best_fit"`: no document is cut that fits into a sample. No torch.

A document of n tokens is n // s rows of s tokens of its own, whose last label is the next token of the document, and a
rest of n % s tokens, which is packed with others (`best_fit`). A rest of one token is left out: without a label of its
own, the token is the last label of the row before. What is left of a row is padding. The lengths in rows depend on
those of the documents alone, and so do the number of samples and the share of padding; which documents of equal length
stand together, and the order of the rows, are shuffled anew in every epoch.

Best-fit decreasing on the counts of lengths (Ding et al. 2024, "Fewer Truncations Improve Language Modeling"):
documents are placed from the longest to the shortest, each into the fullest row with room for it, or a new one. Those
of a length go into rows with equal room together, so that the time depends on the lengths, not on the documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megascale.data.read.epoch_index import BLOCK_DOCUMENTS, EpochIndex, IndexShape, Piece

SHORTEST_REST = 2  # tokens of the shortest rest with a label


@dataclass(frozen=True)
class RowGroup:
    """`rows` rows with the same lengths in them: (length, documents of it) in descending order."""

    rows: int
    contents: tuple[tuple[int, int], ...] = ()

    def add(self, rows: int, length: int, documents: int) -> RowGroup:
        """Return `rows` of these rows with `documents` more documents of a length each."""
        return RowGroup(rows, (*self.contents, (length, documents)))


def best_fit(counts: Sequence[int], capacity: int) -> list[RowGroup]:
    """Pack counts[n] documents of n tokens, 0 < n <= capacity, into rows of `capacity` tokens."""
    groups = defaultdict[int, list[RowGroup]](list)  # by room
    rooms: list[int] = []  # ascending, those with groups
    for length in range(len(counts) - 1, 0, -1):
        left = int(counts[length])
        while left:
            room, group = _take_fullest(groups, rooms, length) or (capacity, RowGroup(left))
            each = room // length  # a row stays the fullest with room until it has no more
            full = min(group.rows, left // each)
            rest = left - full * each if full < group.rows else 0
            parts = [
                (room - each * length, group.add(full, length, each)),
                (room - rest * length, group.add(1, length, rest)) if rest else (0, RowGroup(0)),
            ]
            if room < capacity or group.contents:
                parts.append((room, RowGroup(group.rows - full - bool(rest), group.contents)))
            for remaining, part in parts:
                if part.rows:
                    if not groups[remaining]:
                        insort(rooms, remaining)
                    groups[remaining].append(part)
            left -= full * each + rest
    return [group for room in rooms for group in groups[room]]


def _take_fullest(groups: dict[int, list[RowGroup]], rooms: list[int], length: int) -> tuple[int, RowGroup] | None:
    """Take a group of the fullest rows with room for a length."""
    place = bisect_left(rooms, length)
    if place == len(rooms):
        return None
    room = rooms[place]
    group = groups[room].pop()
    if not groups[room]:
        del rooms[place]
    return room, group


@dataclass(frozen=True)
class BestFitShape(IndexShape):
    """The shape of an index: `parts` of documents in `rows` samples. `left_out`: rests of one token.

    `documents` of the index has a document for each part, and `starts` the first part of each row. A row with several
    parts has the rests of documents of `seq_length` tokens or more, and shorter documents.
    """

    parts: int
    rows: int
    left_out: int

    @property
    def documents(self) -> int:
        return self.parts

    @property
    def samples(self) -> int:
        return self.rows

    @property
    def fewest_tokens(self) -> int:
        return min(SHORTEST_REST, self.seq_length)

    @property
    def padding(self) -> float:
        """The share of padding in the tokens of the samples."""
        return 1 - (self.tokens - self.left_out) / (self.rows * self.seq_length)

    def pieces_of(self, index: EpochIndex, sample: int, lengths: np.ndarray) -> list[Piece]:
        """The pieces of a row; the label that follows a whole row is part of it."""
        (place, start), (last, _) = index.starts[sample : sample + 2].tolist()
        documents, s = index.documents_of(sample, place, last), self.seq_length
        sizes = [int(lengths[document]) for document in documents]
        if len(documents) == 1:
            return [Piece(documents[0], start, min(start + s + 1, sizes[0]))]
        return [Piece(document, size - size % s, size) for document, size in zip(documents, sizes, strict=True)]

    def build(self, lengths: np.ndarray, seed: int) -> EpochIndex:
        random, s = np.random.RandomState(seed), self.seq_length
        documents = np.arange(self.first, self.last, dtype=np.int32)
        random.shuffle(documents)
        sizes = np.array(lengths)[documents]
        whole = sizes // s
        parts, widths = [np.repeat(documents, whole)], [np.ones(int(whole.sum()), dtype=np.int64)]
        ends = np.cumsum(whole)
        offsets = [(np.arange(len(parts[0])) - np.repeat(ends - whole, whole)) * s]
        rests = sizes % s
        firsts = sizes - rests  # the first token of each rest
        by_length = np.argsort(rests, kind="stable")  # of equal lengths in the shuffled order
        counts = np.bincount(rests, minlength=s)
        taken = np.cumsum(counts) - counts  # the place in `by_length` of the next document of each length
        counts[:SHORTEST_REST] = 0
        for group in best_fit(counts.tolist(), s):
            columns = []  # the documents of each length in the rows, the next ones of it
            for length, number in group.contents:
                first = int(taken[length])
                taken[length] += group.rows * number
                columns.append(by_length[first : int(taken[length])].reshape(group.rows, number))
            rows = np.concatenate(columns, 1)
            parts.append(documents[rows].ravel())
            widths.append(np.full(group.rows, rows.shape[1], dtype=np.int64))
            offsets.append(firsts[rows[:, 0]])
        places = np.cumsum(np.concatenate([[0], *widths]))
        starts = np.stack([places, np.concatenate([*offsets, [0]])], 1).astype(np.int32)
        if (int(places[-1]), len(starts) - 1) != (self.parts, self.rows):
            found = f"{places[-1]} parts in {len(starts) - 1} rows"
            raise ValueError(f"documents {self.first} to {self.last} have {found}, not {self.parts} in {self.rows}")
        order = np.arange(self.samples, dtype=self.order_dtype)
        random.shuffle(order)
        return EpochIndex(self, np.concatenate(parts), starts, order)


def best_fit_shape(concatenated: IndexShape, lengths: np.ndarray) -> BestFitShape:
    """The shape of an epoch, from the `lengths` of all documents of the dataset.

    Raises: ValueError for a negative length
    """
    s, whole = concatenated.seq_length, 0
    counts = np.zeros(s, dtype=np.int64)
    for first in range(concatenated.first, concatenated.last, BLOCK_DOCUMENTS):
        block = np.array(lengths[first : min(first + BLOCK_DOCUMENTS, concatenated.last)], dtype=np.int64)
        whole += int((block // s).sum())
        counts += np.bincount(block % s, minlength=s)
    left_out = int(counts[1:SHORTEST_REST].sum())
    counts[:SHORTEST_REST] = 0
    rows = whole + sum(group.rows for group in best_fit(counts.tolist(), s))
    return BestFitShape(**vars(concatenated), parts=whole + int(counts.sum()), rows=rows, left_out=left_out)
