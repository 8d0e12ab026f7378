"""The samples of an epoch of one bucket with `data.packing = "decompose"`: pieces of documents, all of one length.

A document of n tokens is n // s pieces of s tokens, and of its rest a piece for each power of two in the binary digits
of n % s, the longest first. A piece of 2^i tokens therefore starts at the last multiple of 2^(i + 1), and an index of a
bucket is a list of documents. The pieces of a bucket are shuffled in every epoch, and s / 2^i of them fill a sample.
Pieces below `data.min_piece` are in no bucket; the last pieces of a bucket that fill no sample are others each epoch.
No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megascale.data.read.epoch_index import BLOCK_DOCUMENTS, EpochIndex, IndexShape, Piece


@dataclass(frozen=True)
class DecomposedShape(IndexShape):
    """The shape of an index of a bucket: `pieces` of `piece` tokens in the documents."""

    piece: int
    pieces: int

    @property
    def documents(self) -> int:
        return self.samples * (self.seq_length // self.piece)

    @property
    def samples(self) -> int:
        return self.pieces // (self.seq_length // self.piece)

    @property
    def fewest_tokens(self) -> int:
        return self.seq_length

    def build(self, lengths: np.ndarray, seed: int) -> DecomposedIndex:
        return build_decomposed_index(self, lengths, seed)

    def index(self, documents: np.ndarray, starts: np.ndarray, order: np.ndarray) -> DecomposedIndex:
        return DecomposedIndex(documents, starts, order, self.seq_length, self.piece)


@dataclass(frozen=True)
class DecomposedIndex(EpochIndex):
    """An index whose `documents` has the document of each piece, and `starts` the place of the first piece of each
    sample and, for pieces that fill a sample, its first token.
    """

    seq_length: int
    piece: int

    def pieces(self, index: int, lengths: np.ndarray) -> list[Piece]:
        """The pieces of a sample, as of `EpochIndex`, without the label that follows the last token."""
        row, size = int(self.order[index]), self.piece
        place, start = self.starts[row].tolist()
        last = place + self.seq_length // size
        if not 0 <= place < last <= len(self.documents):
            raise IndexError(f"sample {row} has pieces {place} to {last} of {len(self.documents)}")
        documents = self.documents[place:last].tolist()
        if min(documents) < 0:
            raise IndexError(f"document {min(documents)}")
        if size == self.seq_length:
            return [Piece(documents[0], start, start + size)]
        firsts = (int(lengths[document]) // (2 * size) * (2 * size) for document in documents)
        return [Piece(document, first, first + size) for document, first in zip(documents, firsts, strict=True)]


def decomposed_shapes(
    concatenated: IndexShape, lengths: np.ndarray, pieces: Sequence[int]
) -> dict[int, DecomposedShape]:
    """The shape of an epoch of each bucket, by the tokens of its `pieces`, from the `lengths` of all documents."""
    counts = dict.fromkeys(pieces, 0)
    for first in range(concatenated.first, concatenated.last, BLOCK_DOCUMENTS):
        block = np.array(lengths[first : min(first + BLOCK_DOCUMENTS, concatenated.last)])
        for piece in pieces:
            counts[piece] += int(_pieces_of(block, concatenated.seq_length, piece).sum(dtype=np.int64))
    facts = vars(concatenated)
    return {piece: DecomposedShape(**facts, piece=piece, pieces=count) for piece, count in counts.items()}


def _pieces_of(lengths: np.ndarray, seq_length: int, piece: int) -> np.ndarray:
    """The number of pieces of `piece` tokens in documents of these lengths. Both sizes are powers of two."""
    return lengths // seq_length if piece == seq_length else (lengths & piece) // piece


def build_decomposed_index(shape: DecomposedShape, lengths: np.ndarray, seed: int) -> DecomposedIndex:
    """Build the index of an epoch. `lengths`: of all documents of the dataset, in tokens. `seed`: u32."""
    s, width = shape.seq_length, shape.seq_length // shape.piece
    counts = _pieces_of(np.array(lengths[shape.first : shape.last]), s, shape.piece)
    documents = np.repeat(np.arange(shape.first, shape.last, dtype=np.int32), counts)
    if len(documents) != shape.pieces:
        found = f"{len(documents)} pieces of {shape.piece} tokens, not {shape.pieces}"
        raise ValueError(f"documents {shape.first} to {shape.last} have {found}")
    chosen = np.random.RandomState(seed).permutation(shape.pieces)[: shape.documents]
    starts = np.zeros((shape.samples + 1, 2), dtype=np.int32)
    starts[:, 0] = np.arange(shape.samples + 1) * width
    if width == 1:
        before = np.cumsum(counts) - counts  # pieces of earlier documents
        starts[:-1, 1] = ((np.arange(shape.pieces) - np.repeat(before, counts)) * s)[chosen]
    order = np.arange(shape.samples, dtype=shape.order_dtype)  # pieces are shuffled already
    return DecomposedIndex(documents[chosen], starts, order, s, shape.piece)
