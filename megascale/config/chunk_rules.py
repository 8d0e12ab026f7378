"""Rules of chunks of sequences (`data.chunk_tokens`): sizes, and keys without an implementation for chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megascale.config.finding import Finding, Rule


def chunk_sizes(c: Any) -> Iterator[Finding]:
    """Check the division of a sequence by chunks, and with sp of a chunk by tp ranks."""
    d, p, length = c.data, c.parallel, c.model.seq_length
    if d.chunk_tokens is None:
        if d.keep_chunks != 1:
            yield Finding("data.keep_chunks", "has no effect without data.chunk_tokens", "remove the key")
        return
    unit = p.tp if p.sp else 1
    if length % d.chunk_tokens or length == d.chunk_tokens:
        message = f"a sequence of {length} cannot be cut into chunks of {d.chunk_tokens}"
        yield Finding("data.chunk_tokens", message, f"a divisor of {length}, smaller than it")
    elif d.chunk_tokens % unit:
        message = f"{d.chunk_tokens} tokens cannot be split over tp = {unit} ranks"
        yield Finding("data.chunk_tokens", message, f"a multiple of {unit} that divides {length}")
    elif d.keep_chunks > length // d.chunk_tokens:
        message = f"a sequence has {length // d.chunk_tokens} chunks"
        yield Finding("data.keep_chunks", message, f"at most {length // d.chunk_tokens}")


def chunk_schedule(c: Any) -> Iterator[Finding]:
    """Check for one model chunk per rank, for state-aware 1F1B."""
    p = c.parallel
    if c.data.chunk_tokens is None:
        return
    if p.vpp > 1:
        yield Finding("parallel.vpp", f"chunks of sequences have no schedule with vpp = {p.vpp}", "1")
    elif p.schedule not in (None, "1f1b"):
        message = f"{p.schedule} has no order of chunks that depend on each other"
        yield Finding("parallel.schedule", message, "1f1b, or remove the key")


def chunk_combinations(c: Any) -> Iterator[Finding]:
    """Check for keys without an implementation for chunks of sequences."""
    m, p, t, d = c.model, c.parallel, c.train, c.data
    if d.chunk_tokens is None:
        return
    for found, key, message, hint in (
        (p.cp > 1, "parallel.cp", f"a rank has all chunks of a sequence, and cp = {p.cp} splits it", "1"),
        (p.cp_mode == "hybrid", "parallel.cp_mode", "hybrid deals whole documents to ranks", "ring"),
        (m.dropout, "model.dropout", "chunks have no dropout", "0"),
        (m.attention_softcap is not None, "model.attention_softcap", "needs all keys at once", "whole sequences"),
        (t.quantizes, "train.precision", "chunks have no scales of fp8 that recomputation repeats", "bf16"),
        (t.noise_scale_every, "train.noise_scale_every", "the gradient of a sequence is a sum over chunks", "0"),
        (d.policy is not None, "data.policy", "the loss of a sequence is a sum over chunks", "no policy"),
    ):
        if found:
            yield Finding(key, f"{message} (data.chunk_tokens = {d.chunk_tokens})", f"{hint}, or no chunk_tokens")


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("model", "parallel", "data"), chunk_sizes),
    (("parallel", "data"), chunk_schedule),
    (("model", "parallel", "train", "data"), chunk_combinations),
)
