"""Rules of hybrid data parallelism (`parallel.cp_mode = "hybrid"`): its keys, and keys without an implementation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megascale.config.finding import Finding, Rule


def hybrid_keys(c: Any) -> Iterator[Finding]:
    """Check the tokens of a rank, and the pool's room for the longest document."""
    d, p = c.data, c.parallel
    if p.cp_mode != "hybrid":
        if d.max_tokens_per_rank is not None:
            message = f"has no effect with cp_mode = {p.cp_mode}"
            yield Finding("data.max_tokens_per_rank", message, "parallel.cp_mode = hybrid, or remove the key")
        return
    if d.max_tokens_per_rank is None:
        yield Finding("data.max_tokens_per_rank", "hybrid needs the most tokens of a rank in a micro-batch", "a number")
    elif isinstance(p.dp, int) and (held := p.dp * p.cp * d.max_tokens_per_rank) < c.model.seq_length:
        message = f"{p.dp * p.cp} ranks hold {held} tokens, and a document may have {c.model.seq_length}"
        yield Finding("data.max_tokens_per_rank", message, f"{-(-c.model.seq_length // (p.dp * p.cp))} or more")
    if d.mask != "document":
        yield Finding("data.mask", "hybrid deals documents to ranks, each with its own attention", "document")


def hybrid_combinations(c: Any) -> Iterator[Finding]:
    """Check for keys without an implementation for planned micro-batches."""
    m, p, t, d, b = c.model, c.parallel, c.train, c.data, c.batch
    if p.cp_mode != "hybrid":
        return
    for found, key, message, hint in (
        (p.vpp > 1, "parallel.vpp", "pipelines have any number of micro-batches", "1"),
        (p.schedule not in (None, "1f1b"), "parallel.schedule", "rings meet on all stages in 1F1B", "1f1b"),
        (p.sp, "parallel.sp", "tokens of a rank need not divide over tp", "false"),
        (p.zero > 1, "parallel.zero", "ranks have different numbers of reductions of gradients", "0 or 1"),
        (b.micro > 1, "batch.micro", "the planner packs documents", "1"),
        (b.rampup is not None, "batch.rampup", "steps have no fixed number of micro-batches", "no ramp-up"),
        (m.dropout, "model.dropout", "has no dropout", "0"),
        (m.attention_softcap is not None, "model.attention_softcap", "needs all keys at once", "no soft cap"),
        (t.quantizes, "train.precision", "has no scales of fp8 that ranks agree on", "bf16"),
        (t.compile, "train.compile", "micro-batches have any number of tokens", "false"),
        (t.noise_scale_every, "train.noise_scale_every", "micro-batches are no samples", "0"),
        (d.policy is not None, "data.policy", "micro-batches have documents of many datasets", "no policy"),
        (d.reader == "host", "data.reader", "every rank reads the boundaries of all samples of a step", "rank"),
    ):
        if found:
            yield Finding(key, f"{message} (parallel.cp_mode = hybrid)", hint)


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("model", "parallel", "data"), hybrid_keys),
    (("model", "parallel", "train", "data", "batch"), hybrid_combinations),
)
