"""Rules of context parallelism: what a sequence, heads and other keys must be for ranks to share sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megascale.catalog.recipes import RECIPES
from megascale.config.finding import Finding, Rule


def cp_modes(c: Any) -> Iterator[Finding]:
    """Check that the keys of context parallelism have an effect, and that usp says how many ranks exchange heads."""
    p = c.parallel
    key = "parallel.cp_ulysses"
    if p.cp_ulysses > 1 and p.cp_mode != "usp":
        yield Finding(key, f"has no effect with cp_mode = {p.cp_mode}", "cp_mode = usp, or remove the key")
    elif p.cp_ulysses == 1 and p.cp_mode == "usp" and p.cp > 1:
        yield Finding(key, "usp needs the number of neighbouring ranks that exchange heads", "2 or more")
    elif p.cp % p.cp_ulysses:
        message = f"{p.cp_ulysses} ranks that exchange heads do not divide cp = {p.cp}"
        yield Finding(key, message, f"a divisor of {p.cp}")


def cp_sequence(c: Any) -> Iterator[Finding]:
    """Check that ranks, and with sp their tp ranks, share a sequence in equal parts."""
    m, p = c.model, c.parallel
    if p.cp == 1 or p.cp % p.cp_heads or p.cp_mode == "hybrid":
        return
    unit = p.cp * (p.tp if p.sp else 1)
    halves = 2 * p.cp_keys if p.cp_keys > 1 else 1  # a chunk near the head and one near the tail
    for divisor, what in (
        (halves, f"2 x {p.cp_keys} chunks"),
        (unit, f"cp x tp = {unit} ranks" if p.sp else f"cp = {p.cp}"),
    ):
        if m.seq_length % divisor:
            message = f"a sequence of {m.seq_length} cannot be split into {what}"
            yield Finding("model.seq_length", message, f"a multiple of {math.lcm(halves, unit)}")
            return


def cp_heads(c: Any) -> Iterator[Finding]:
    """Check that ranks that exchange heads get equal numbers of them, and whole groups of key-value heads or one."""
    m, p, ranks = c.model, c.parallel, c.parallel.cp_heads
    if ranks == 1 or m.num_heads % p.tp or m.num_kv_heads % p.tp:
        return
    key = "parallel.cp_ulysses" if p.cp_mode == "usp" else "parallel.cp"
    queries, keys = m.num_heads // p.tp, m.num_kv_heads // p.tp
    if queries % ranks:
        message = f"{queries} heads of a tp rank cannot be split over {ranks} ranks that exchange heads"
        yield Finding(key, message, "fewer ranks, cp_mode = ring or allgather, or usp with fewer neighbours")
    elif keys % ranks and ranks % keys:
        message = f"{keys} key-value heads of a tp rank can neither be split over {ranks} ranks nor repeated for them"
        yield Finding(key, message, "ranks that divide the key-value heads, or a multiple of them")


def cp_fp8(c: Any) -> Iterator[Finding]:
    """Check that the tokens of a rank, and with scales of blocks its consecutive ones, are multiples of what the FP8
    recipe needs.
    """
    m, p, facts = c.model, c.parallel, RECIPES[c.fp8.recipe].facts
    if not c.train.quantizes or p.cp == 1 or p.cp % p.cp_heads:
        return
    blocks, runs = facts["granularity"] == "block", p.cp_keys * math.lcm(2, p.cp_heads) if p.cp_keys > 1 else p.cp
    tokens, alignment = m.seq_length * c.batch.micro // (runs if blocks else p.cp), facts["alignment"]
    if tokens % alignment:
        message = f"{tokens} {'consecutive ' if blocks else ''}tokens of a micro-batch on a rank along cp"
        needs = f"the fp8 recipe {c.fp8.recipe} needs multiples of {alignment}"
        yield Finding("parallel.cp", f"{message}: {needs}", "fewer ranks, a longer sequence, or another fp8.recipe")


def cp_sharding(c: Any) -> Iterator[Finding]:
    """Check that a run whose ranks shall hold chunks of documents can cut them."""
    p, recipe = c.parallel, c.fp8.recipe
    if p.cp_sharding != "document":
        return
    if c.data.mask != "document":
        message, hint = "chunks of documents need data.mask = document", "data.mask = document"
    elif p.cp > 1 and p.cp_keys == 1:
        message, hint = f"has no effect with cp_mode = {p.cp_mode}", "ring, allgather or usp"
    elif c.batch.micro > 1:
        message, hint = f"the {c.batch.micro} rows of a micro-batch have different documents", "batch.micro = 1"
    elif c.train.quantizes and RECIPES[recipe].facts["granularity"] == "block":
        message, hint = f"the fp8 recipe {recipe} has scales of consecutive tokens", "another fp8.recipe"
    else:
        return
    yield Finding("parallel.cp_sharding", message, f"{hint}; or cp_sharding = auto")


def cp_combinations(c: Any) -> Iterator[Finding]:
    """Check that no key is set that has no implementation for ranks that share sequences."""
    m, p = c.model, c.parallel
    if p.cp == 1 or p.cp_mode == "hybrid":  # which `hybrid_rules` checks
        return
    if m.dropout:
        yield Finding("model.dropout", f"context parallelism (cp = {p.cp}) has no dropout", "dropout = 0, or cp = 1")
    if m.attention_softcap is not None and p.cp_keys > 1:
        message = f"attention with a soft cap needs all keys at once, and cp_mode = {p.cp_mode} has some at a time"
        yield Finding("parallel.cp_mode", message, "ulysses")


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("parallel",), cp_modes),
    (("model", "parallel"), cp_sequence),
    (("model", "parallel"), cp_heads),
    (("model", "parallel", "batch", "train", "fp8"), cp_fp8),
    (("model", "parallel"), cp_combinations),
    (("parallel", "batch", "train", "fp8", "data"), cp_sharding),
)
