"""The samples of one epoch of a dataset: shuffled documents, concatenated and cut, and the samples shuffled.

The arrays are those of megatron-core's GPTDataset for a single epoch and the same seed, bit for bit. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

BLOCK_DOCUMENTS = 1 << 20
"""Documents whose lengths are summed at a time: the sums of all would take twice the memory of the index."""


class Piece(NamedTuple):
    """Tokens [start, stop) of a document, which are a part of a sample."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class IndexShape:
    """Documents [first, last) of a dataset, `tokens` long together, in samples of `seq_length` tokens and a label."""

    first: int
    last: int
    tokens: int
    seq_length: int

    @property
    def documents(self) -> int:
        return self.last - self.first

    @property
    def samples(self) -> int:
        """Samples of the epoch; neighbours share a token, which is the last label of one and begins the other."""
        return max(0, self.tokens - 1) // self.seq_length

    @property
    def fewest_tokens(self) -> int:
        """The fewest tokens that a sample has in its documents, with the label that follows the last; below that is
        padding.
        """
        return self.seq_length + 1

    @property
    def order_dtype(self) -> type[np.generic]:
        return np.uint32 if self.samples < 2**32 - 2 else np.int64

    def build(self, lengths: np.ndarray, seed: int) -> EpochIndex:
        """Build the index of an epoch. `lengths`: of all documents of the dataset, in tokens. `seed`: u32."""
        random = np.random.RandomState(seed)
        documents = np.arange(self.first, self.last, dtype=np.int32)
        random.shuffle(documents)
        starts = sample_starts(self, lengths, documents)
        order = np.arange(self.samples, dtype=self.order_dtype)
        random.shuffle(order)
        return EpochIndex(self, documents, starts, order)

    def pieces_of(self, index: EpochIndex, sample: int, lengths: np.ndarray) -> list[Piece]:
        """The pieces of a sample of an index (`EpochIndex.pieces`)."""
        (place, start), (last, end) = index.starts[sample : sample + 2].tolist()
        documents = index.documents_of(sample, place, last + 1)
        ends = [*(int(lengths[document]) for document in documents[:-1]), end + 1]
        return [
            Piece(document, start if number == 0 else 0, stop)
            for number, (document, stop) in enumerate(zip(documents, ends, strict=True))
        ]


@dataclass(frozen=True)
class EpochIndex:
    """The index of an epoch of this shape. `documents` [d], i32: the ids of the documents in their order. `starts`
    [n + 1, 2], i32: the place in `documents` and the token in that document at which each sample starts. `order` [n]:
    the sample of each index.
    """

    shape: IndexShape
    documents: np.ndarray
    starts: np.ndarray
    order: np.ndarray

    def pieces(self, index: int, lengths: np.ndarray) -> list[Piece]:
        """The pieces of a sample, in their order. `lengths` [documents of the dataset], in tokens.

        Raises: IndexError for entries out of range
        """
        return self.shape.pieces_of(self, int(self.order[index]), lengths)

    def documents_of(self, sample: int, first: int, stop: int) -> list[int]:
        """The documents at places [first, stop), of a sample. Raises: IndexError"""
        if not 0 <= first < stop <= len(self.documents):
            raise IndexError(f"sample {sample} has documents {first} to {stop} of {len(self.documents)}")
        documents: list[int] = self.documents[first:stop].tolist()
        if min(documents) < 0:
            raise IndexError(f"document {min(documents)}")
        return documents


def sample_starts(shape: IndexShape, lengths: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """The place of token i * seq_length of the concatenated documents, for each sample i and the end of the last."""
    starts = np.empty((shape.samples + 1, 2), dtype=np.int32)
    in_memory = np.array(lengths)  # read once in order: the gather below is in random order
    filled = tokens = 0
    for block in range(0, len(documents), BLOCK_DOCUMENTS):
        sizes = in_memory[documents[block : block + BLOCK_DOCUMENTS]]
        ends = np.cumsum(sizes, dtype=np.int64) + tokens
        tokens = int(ends[-1])
        stop = min(-(-tokens // shape.seq_length), shape.samples + 1)
        wanted = np.arange(filled, stop, dtype=np.int64) * shape.seq_length
        place = np.searchsorted(ends, wanted, side="right")
        starts[filled:stop, 0] = place + block
        starts[filled:stop, 1] = wanted - (ends[place] - sizes[place])
        filled = stop
    if filled <= shape.samples:
        raise ValueError(f"documents {shape.first} to {shape.last} have {tokens} tokens, not {shape.tokens}")
    return starts
