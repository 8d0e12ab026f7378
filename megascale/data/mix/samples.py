"""A training sample, the places of its documents, and the interface to read samples by number (`SampleSource`).

With `data.attention_mask = "document"` a token attends to the earlier tokens of its own document, as if each document
of a sample were a sequence of its own. The first token of a document is then no label: nothing before it predicts it.
Padding, which best fit leaves at the end of a sample, is neither a label nor a part of a document. No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from megascale.data.mix.data_policy import MixtureWeights


class DocumentStarts(NamedTuple):
    """The places at which documents begin in a sample of `length` tokens and a label, ascending and from 0 [documents],
    i64; tokens from `filled` on are padding.
    """

    starts: np.ndarray
    filled: int
    length: int

    @property
    def is_padded(self) -> bool:
        return self.filled < self.length

    @property
    def places(self) -> list[int]:
        """The places of documents among the tokens, and of the padding as a last one."""
        end = min(self.filled, self.length)
        return self.starts[self.starts < end].tolist() + [end] * self.is_padded


@dataclass(frozen=True)
class Sample:
    """`ids` [s + 1], i64: the tokens, and the label of the last one. `mask` [s] in {0, 1}, or the labels' weights, f32,
    with `data.sample_weight`; None if every label counts in the loss. `documents` with `data.attention_mask =
    "document"`.
    """

    ids: np.ndarray
    mask: np.ndarray | None = None
    documents: DocumentStarts | None = None

    @property
    def tokens(self) -> np.ndarray:
        """The tokens [s], i64."""
        return self.ids[:-1]

    @property
    def labels(self) -> np.ndarray:
        """The label of each token [s], i64: the token that follows."""
        return self.ids[1:]


def depth_labels(sample: Sample, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """The labels [s], i64, and weights [s], f64, of a depth of multi-token prediction, from 1: label t is token
    t + depth + 1. The weight is 0 beyond the sample, and if another document begins on the way there.
    """
    mask = np.ones(len(sample.labels)) if sample.mask is None else sample.mask
    labels, weights = np.zeros_like(sample.labels), np.zeros(len(mask))
    labels[:-depth], weights[:-depth] = sample.labels[depth:], mask[depth:]
    for start in () if sample.documents is None else sample.documents.starts:
        weights[max(0, start - depth - 1) : start] = 0
    return labels, weights


class SampleSource(ABC):
    """The samples of a split by their number in the run. By default a source has nothing to prepare, follow or end, and
    reads no file.
    """

    @abstractmethod
    def __getitem__(self, index: int) -> Sample:
        """Read a sample."""

    def check(self) -> None:  # noqa: B027
        """Check all files. Raises: DataError for files that cannot be used, or with fewer tokens than a sample has"""

    def open(self, index: int) -> None:  # noqa: B027
        """Open what a sample is read from; its index may be built for it."""

    def fetch(self, indices: Iterable[int], fetched: Callable[[], object] = lambda: None) -> None:  # noqa: B027
        """Fetch what samples need of all remote datasets, many blocks at a time, before they are read. `fetched` is
        called after each block.
        """

    def documents(self, index: int) -> DocumentStarts:
        """The documents of a sample, with `data.attention_mask = "document"`, for stages that need no tokens."""
        documents = self[index].documents
        assert documents is not None, "only a document mask asks for documents"
        return documents

    def begin(self, consumed: int, end: int = 0) -> None:  # noqa: B027
        """Prepare to read on after `consumed` samples. `end`: samples of the run, if not as many as its configuration
        tells: a resumed run may have had other batches.
        """

    def change_weights(self, weights: MixtureWeights) -> None:  # noqa: B027
        """Follow the weights that a data policy has found. Samples before their first part cannot be read any more."""

    def is_ready(self, consumed: int) -> bool:
        """Return True if `step(consumed)` need not wait."""
        return True

    def step(self, consumed: int) -> AbstractContextManager[None]:
        """Wait for the step that follows `consumed` samples; in the block its samples can be read."""
        return nullcontext()

    def close(self) -> None:  # noqa: B027
        """End what reads for this source."""


def document_starts(lengths: Sequence[int], tokens: np.ndarray | None = None, eod: int | None = None) -> np.ndarray:
    """The places in a sample at which a document begins, ascending and from 0, i64. `lengths`: of the parts of
    documents that it consists of; `eod`: a document also begins after each such token of `tokens`.
    """
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    if eod is None or tokens is None:
        return starts
    after = np.flatnonzero(tokens[:-1] == eod) + 1
    return np.union1d(starts, after)


def label_mask(starts: np.ndarray, count: int, filled: int | None = None) -> np.ndarray | None:
    """The mask of `count` labels, of which label i is token i + 1: 0 for the first token of a document, and from token
    `filled` on. None if all count.
    """
    firsts = starts[starts > 0]
    if not len(firsts) and (filled is None or filled > count):
        return None
    mask = np.ones(count, dtype=np.int64)
    mask[firsts - 1] = 0
    if filled is not None:
        mask[filled - 1 :] = 0
    return mask
