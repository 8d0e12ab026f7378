"""Rows of packed documents: expected lengths, and the scores that attention within documents computes."""

from __future__ import annotations

from collections.abc import Iterable

from megascale.layout.windows import count_scores


def equal_documents(s: int, length: int | None) -> list[int]:
    """The lengths of documents that fill a row of s tokens: `length` each, but for the last; None: a single one."""
    length = min(length or s, s)
    return [length] * (s // length) + ([s % length] if s % length else [])


def count_document_scores(lengths: Iterable[int], block_window: int | None) -> int:
    """Count the scores per head that are computed document by document. `block_window`: as of `AttentionSpec`."""
    return sum(count_scores(n, None if block_window is None else min(block_window, n)) for n in lengths)
