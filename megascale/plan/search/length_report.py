"""Reports of a plan for sequences of unequal lengths: tables for users, a JSON object for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.table import Table

from megascale.core.units import format_bytes, format_count
from megascale.plan.search.length_plan import LengthPlan
from megascale.plan.search.report import plain_table

QUANTILES = {0.5: "50%", 0.9: "90%", 0.99: "99%", 1.0: "longest"}


def tables(plan: LengthPlan) -> Iterator[str | Table]:
    """Report lengths, the ways to train, the modes of context parallelism, offload and the memory of chunks."""
    lengths, work = np.concatenate(plan.draws), plan.pool.work
    cuts = ", ".join(f"{name} {round(float(np.quantile(lengths, q))):,}" for q, name in QUANTILES.items())
    yield (
        f"{plan.times.config.name} with {plan.lengths.name}: {plan.steps} steps of {len(lengths) / plan.steps:,.0f} "
        f"sequences and {format_count(plan.mean_tokens)} tokens in the mean; lengths {cuts}"
    )
    equal = (
        f"; attention takes as long as all else at {work.linear / work.quadratic:,.0f} tokens" if work.quadratic else ""
    )
    yield f"{plan.pool.ranks} ranks of dp x cp, {plan.pool.max_tokens:,} tokens each in a micro-batch{equal}"
    first, rows = plan.ways[0], []
    for way in plan.ways:
        speed = format_count(way.tokens_per_s), f"{way.tokens_per_s / first.tokens_per_s:.2f}"
        makespan = f"{way.makespan:.3f}", f"{way.makespan / way.bound:.2f}"
        counts = "-".join(f"{count:,}" for count in dict.fromkeys(way.microbatches))
        sent, padding = format_bytes(way.context_bytes), f"{way.padding:.1%}"
        rows.append((way.name, f"{way.step_s:.3f}", *speed, *makespan, sent, counts, padding))
    headings = (
        "way", "step s", "tokens/s", "speed", "makespan s", "over bound", "context bytes", "micro-batches", "padding",
    )  # fmt: skip
    yield plain_table(headings, rows)
    yield "the bound: equal work on all ranks without communication; gradient reductions are left out, alike for all"
    exchanges = list[tuple[str, ...]]()
    for ranks, modes, crossover in plan.mode_rows():
        cells = [f"{format_bytes(sent)}, {1e3 * seconds:.2f} ms" for sent, seconds in modes.values()]
        exchanges.append((f"{ranks}", *cells, "none" if crossover is None else f"{crossover:,}"))
    names = [f"{mode}: sent in a layer, exposed in a stage" for mode in ("Ulysses", "ring", "all-gather")]
    yield plain_table((f"cp for {plan.longest:,} tokens", *names, "ring exposes less from"), exchanges)
    yield from _lines(plan)


def _lines(plan: LengthPlan) -> Iterator[str]:
    """Report offload and chunks in lines."""
    hardware, (least, offloaded, share) = plan.times.hardware, plan.times.ranks_of(plan.longest)
    if hardware.device.host_bandwidth:
        yield (
            f"the longest sequence takes {least} ranks; {share:.0%} of its activations can leave to host memory behind "
            f"compute, then {offloaded}"
        )
    else:
        yield f"the longest sequence takes {least} ranks; {hardware.name} states no bandwidth to host memory"
    if plan.chunk_tokens:
        fullest = plan.chunked_memory(plan.chunk_tokens, plan.keep)
        grows = fullest.store + fullest.inputs
        yield (
            f"chunks: {format_bytes(fullest.total)} on the fullest rank, of which {format_bytes(grows)} grow with the "
            f"longest sequence (keys and values with their gradients, and inputs of recomputed chunks)"
        )


def length_json(plan: LengthPlan) -> dict[str, Any]:
    """Return a plan in seconds, bytes and tokens."""
    least, offloaded, share = plan.times.ranks_of(plan.longest)
    modes = [
        {
            "cp": ranks,
            **{mode: {"layer_bytes": sent, "exposed_s": seconds} for mode, (sent, seconds) in costs.items()},
            "ring_exposes_less_from": crossover,
        }
        for ranks, costs, crossover in plan.mode_rows()
    ]
    chunks = None
    if plan.chunk_tokens:
        fullest = plan.chunked_memory(plan.chunk_tokens, plan.keep)
        chunks = {"tokens": plan.chunk_tokens, "keep": plan.keep, "memory": vars(fullest) | {"total": fullest.total}}
    return {
        "name": plan.times.config.name,
        "lengths": plan.lengths.name,
        "steps": plan.steps,
        "sequences": sum(map(len, plan.draws)) / plan.steps,
        "tokens": plan.mean_tokens,
        "longest": plan.longest,
        "ranks": plan.pool.ranks,
        "max_tokens_per_rank": plan.pool.max_tokens,
        "work": asdict(plan.pool.work),
        "ways": [asdict(way) for way in plan.ways],
        "modes": modes,
        "longest_ranks": {"without_offload": least, "with_offload": offloaded, "offload_share": share},
        "chunks": chunks,
    }
