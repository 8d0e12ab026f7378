"""The samples of an epoch of one bucket with `data.packing = "decompose"`: pieces of documents, all of one length.

A document of n tokens is n // s pieces of s tokens, and of its rest a piece for each power of two in the binary digits
of n % s, the longest first. A piece of 2^i tokens therefore starts at the last multiple of 2^(i + 1), and an index of a
bucket is a list of documents. The pieces of a bucket are shuffled in every epoch, and s / 2^i of them fill a sample.
Pieces below `data.decompose_min_length` are in no bucket; the last pieces of a bucket that fill no sample are others
each epoch. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megascale.data.read.epoch_index import BLOCK_DOCUMENTS, EpochIndex, IndexShape, Piece


@dataclass(frozen=True)
class DecomposedShape(IndexShape):
    """The shape of an index of a bucket: `pieces` of `piece` tokens in the documents.

    `documents` of the index has the document of each piece, and `starts` the place of the first piece of each sample
    and, for pieces that fill a sample, its first token.
    """

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

    def build(self, lengths: np.ndarray, seed: int) -> EpochIndex:
        s, width = self.seq_length, self.seq_length // self.piece
        counts = _pieces_of(np.array(lengths[self.first : self.last]), s, self.piece)
        documents = np.repeat(np.arange(self.first, self.last, dtype=np.int32), counts)
        if len(documents) != self.pieces:
            found = f"{len(documents)} pieces of {self.piece} tokens, not {self.pieces}"
            raise ValueError(f"documents {self.first} to {self.last} have {found}")
        chosen = np.random.RandomState(seed).permutation(self.pieces)[: self.documents]
        starts = np.zeros((self.samples + 1, 2), dtype=np.int32)
        starts[:, 0] = np.arange(self.samples + 1) * width
        if width == 1:
            before = np.cumsum(counts) - counts  # pieces of earlier documents
            starts[:-1, 1] = ((np.arange(self.pieces) - np.repeat(before, counts)) * s)[chosen]
        order = np.arange(self.samples, dtype=self.order_dtype)  # pieces are shuffled already
        return EpochIndex(self, documents[chosen], starts, order)

    def pieces_of(self, index: EpochIndex, sample: int, lengths: np.ndarray) -> list[Piece]:
        """The pieces of a sample, without the label that follows the last token."""
        size, (place, start) = self.piece, index.starts[sample].tolist()
        documents = index.documents_of(sample, place, place + self.seq_length // size)
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
