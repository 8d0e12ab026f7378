"""Rules of `[data]`: packing and masks, the order of documents, and the samples that are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megascale.config.finding import Finding, Rule


def document_mask(c: Any) -> Iterator[Finding]:
    """Check that keys of packing and of the document mask have an effect."""
    d = c.data
    if d.mock and d.packing != "concat":
        yield Finding("data.packing", "has no effect on mock data", "remove the key")
    given = {"boundary_loss": d.boundary_loss, "eod": d.eod is not None, "document_length": d.document_length}
    for key in (key for key, value in given.items() if value and d.mask != "document"):
        yield Finding(f"data.{key}", f"has no effect with mask = {d.mask}", "mask = document, or remove the key")
    if d.eod is not None and d.eod >= c.model.vocab_size:
        message = f"{d.eod} is no token of a vocabulary of {c.model.vocab_size}"
        yield Finding("data.eod", message, "the id of the end-of-document token")


def document_order(c: Any) -> Iterator[Finding]:
    """Check that a file of the order of documents has one dataset, which is concatenated."""
    d = c.data
    if d.order is None:
        return
    for found, message, hint in (
        (d.mock, "has no effect on mock data", "remove the key"),
        (isinstance(d.train, list), "is the order of one dataset, and data.train is a blend", "a single dataset"),
        (d.packing != "concat", f"has no effect with packing = {d.packing}", "packing = concat, or remove the key"),
    ):
        if found:
            yield Finding("data.order", message, hint)
            return


def skipped_samples(c: Any) -> Iterator[Finding]:
    """Check that the ranges of data.skip ascend and do not overlap."""
    end = 0
    for start, stop in c.data.skip:
        if start < end or stop <= start:
            message = f"[{start}, {stop}] is empty, or begins before the end of the range before it"
            yield Finding("data.skip", message, "ranges [start, stop] in ascending order, such as [[1000, 2000]]")
            return
        end = stop


def changed_weights(c: Any) -> Iterator[Finding]:
    """Check that data.weights is for the datasets of data.train, and that its places ascend."""
    source = c.data.train
    count = len(source) if isinstance(source, list) else 1
    end, hint = -1, "[[place, [a weight for each dataset of data.train]], ...], with ascending places"
    for place, weights in c.data.weights:
        if len(weights) != count or not sum(weights):
            message = (
                f"{weights} at {place}: data.train has {count} dataset{'s' * (count > 1)}; not all weights may be 0"
            )
            yield Finding("data.weights", message, hint)
        if place <= end:
            yield Finding("data.weights", f"place {place} does not come after {end}", hint)
        end = place


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("data",), skipped_samples),
    (("data",), changed_weights),
    (("data",), document_order),
    (("model", "data"), document_mask),
)
"""(sections that the rule reads, rule), as in `rules`."""
