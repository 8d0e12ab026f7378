"""Scores of attention by window or sparse pattern: of whole sequences, of documents packed in a row, or as counted in
training.

Two conventions (`account.flops`): `full`, keys x queries, or the window of every query; `causal`, what a causal mask
leaves. In a document of n tokens a window of w >= n leaves n^2 and n^2 / 2, a shorter one n w and n w - w^2 / 2, and a
sparse pattern what `SparsePattern.count_scores` says.
"""

from __future__ import annotations

from collections.abc import Iterable

from megascale.config.data import DataConfig
from megascale.config.model import ModelConfig
from megascale.config.sparse_pattern import Reach, SparsePattern
from megascale.layout.packs import equal_documents
from megascale.layout.parts.part import Scores
from megascale.layout.windows import score_windows


def windows_of(model: ModelConfig) -> list[Reach | None]:
    """The distinct windows and patterns of a model's layers with scores."""
    return list(dict.fromkeys(score_windows(model)))


def count_scores_in(lengths: Iterable[int], window: Reach | None) -> tuple[float, float]:
    """Count the scores of documents of these lengths, the mean over heads: full, causal."""
    if isinstance(window, SparsePattern):
        fulls, causals = zip((0.0, 0.0), *map(window.count_scores, lengths), strict=True)
        return sum(fulls), sum(causals)
    full = causal = 0.0
    for length in lengths:
        keys = length if window is None else min(window, length)
        full += length * keys
        causal += length * keys - keys * keys / 2
    return full, causal


def scores_per_token(model: ModelConfig, lengths: list[int] | None = None) -> Scores:
    """Scores per token in a row of documents of these lengths, by default one as long as the row."""
    lengths = [model.seq_length] if lengths is None else lengths
    tokens = sum(lengths)
    counts = {window: count_scores_in(lengths, window) for window in windows_of(model)}
    return {window: (full / tokens, causal / tokens) for window, (full, causal) in counts.items()}


def expected_documents(model: ModelConfig, data: DataConfig) -> list[int]:
    """The lengths of documents in a row, as a run expects them: a single one without a document mask, and without
    `data.document_length`, which is the upper bound of what is attended to.
    """
    return equal_documents(model.seq_length, data.document_length if data.attention_mask == "document" else None)


def expected_scores(model: ModelConfig, data: DataConfig) -> Scores:
    """Scores per token, as a run expects its documents."""
    return scores_per_token(model, expected_documents(model, data))


def describe_documents(data: DataConfig) -> str:
    """Say in a line what attention is counted for; empty without a document mask."""
    if data.attention_mask == "causal":
        return ""
    if data.document_length is None:
        return "attention is counted for one document per sample, the upper bound, as data.document_length is not set"
    return f"attention is counted for documents of {data.document_length} tokens, data.document_length"
