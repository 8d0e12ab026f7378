"""The documents in a sample: positions that restart, and labels that do not count. No torch.

With `data.mask = "document"` a token attends to the earlier tokens of its own document, as if each document of a sample
were a sequence of its own. The first token of a document is then no label: nothing before it predicts it. Padding,
which best fit leaves at the end of a sample, is neither a label nor a part of a document.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def document_starts(lengths: Sequence[int], tokens: np.ndarray | None = None, eod: int | None = None) -> np.ndarray:
    """The places in a sample at which a document begins, ascending and from 0, i64. `lengths`: of the parts of
    documents that it consists of; `eod`: a document also begins after each such token of `tokens`.
    """
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    if eod is None or tokens is None:
        return starts
    after = np.flatnonzero(tokens[:-1] == eod) + 1
    return np.union1d(starts, after)


PADDING = -1
"""The position of padding."""


def positions_in_documents(starts: np.ndarray, count: int, filled: int | None = None) -> np.ndarray:
    """The position of each of `count` tokens within its document [count], i64; `PADDING` from token `filled` on."""
    inside = starts[starts < count]
    firsts = np.repeat(inside, np.diff([*inside, count]))
    positions = np.arange(count, dtype=np.int64) - firsts
    if filled is not None:
        positions[filled:] = PADDING
    return positions


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
