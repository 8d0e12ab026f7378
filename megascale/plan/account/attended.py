"""Scores of attention by window: of whole sequences, of documents packed in a row, or as counted in training.

Two conventions (`account.flops`): `full`, keys x queries, or the window of every query; `causal`, what a causal mask
leaves. In a document of n tokens a window of w >= n leaves n^2 and n^2 / 2, a shorter one n w and n w - w^2 / 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.layout.blocks import AttentionSpec, distinct_blocks, parts_of_type
from megascale.layout.document_lengths import equal_documents

Scores = Mapping[int | None, tuple[float, float]]
"""Scores of a head in the two conventions, full and causal, by the layer's window; None for full attention."""


def windows_of(model: ModelConfig) -> list[int | None]:
    """The distinct windows of a model's layers."""
    specs = (part for block in distinct_blocks(model)[0] for part in parts_of_type(block, AttentionSpec))
    return list(dict.fromkeys(part.window for part in specs))


def count_scores_in(lengths: Iterable[int], window: int | None) -> tuple[float, float]:
    """Count the scores of documents of these lengths: full, causal."""
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


def expected_documents(config: RunConfig) -> list[int]:
    """The lengths of documents in a row, as a run expects them: a single one without a document mask, and without
    `data.document_length`, which is the upper bound of what is attended to.
    """
    within = config.data.mask == "document"
    return equal_documents(config.model.seq_length, config.data.document_length if within else None)


def expected_scores(config: RunConfig) -> Scores:
    """Scores per token, as a run expects its documents."""
    return scores_per_token(config.model, expected_documents(config))


def describe_documents(config: RunConfig) -> str:
    """Say in a line what attention is counted for; empty without a document mask."""
    if config.data.mask == "causal":
        return ""
    length = config.data.document_length
    if length is None:
        return "attention is counted for one document per sample, the upper bound, as data.document_length is not set"
    return f"attention is counted for documents of {length} tokens, data.document_length"
