"""Rows of packed documents: expected lengths."""

from __future__ import annotations


def equal_documents(s: int, length: int | None) -> list[int]:
    """The lengths of documents that fill a row of s tokens: `length` each, but for the last; None: a single one."""
    length = min(length or s, s)
    return [length] * (s // length) + ([s % length] if s % length else [])
