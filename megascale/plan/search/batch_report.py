"""Reports of a plan of the global batch: tables for users, a JSON object for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from megascale.core.units import format_count
from megascale.layout.parameters import parameter_count
from megascale.plan.account.flops import head_flops, token_flops
from megascale.plan.search.batch_plan import BatchPlan
from megascale.plan.search.report import plain_table

LR_EXPONENTS = (0.75, 1.0)
"""The best learning rate grows with a power of the batch in this range (Shuai et al. 2024)."""


def tables(plan: BatchPlan) -> Iterator[str | Table]:
    """Report a plan: inputs, the batches along the training, the trade-off, and the keys."""
    model, length = plan.config.model, plan.seq_length
    flops = plan.tokens * (token_flops(model).full - head_flops(model))
    yield (
        f"{plan.config.name}: {format_count(parameter_count(model))} parameters, {format_count(plan.tokens)} tokens "
        f"in sequences of {length:,}, {flops:.3g} FLOPs without the head; micro x dp = {plan.unit}"
    )
    yield f"critical batch at the end: {format_count(plan.end)} tokens, {plan.source}"
    along = [
        (format_count(tokens), format_count(critical), f"{critical / length:,.1f}", f"{batch:,}")
        for tokens, critical, batch in plan.stages()
    ]
    yield plain_table(("after tokens", "critical, tokens", "sequences", "recommended batch"), along)
    found, rows = list(plan.trade_off()), []
    own = next(row for row in found if row["global"] == plan.config.batch.total)
    for row in found:
        low, high = sorted((row["global"] / own["global"]) ** exponent for exponent in LR_EXPONENTS)
        name = f"{row['global']:,.0f}{' (this configuration)' if row is own else ''}"
        cells = [f"{row['steps_over_least']:.2f}", f"{row['tokens_over_least']:.2f}"]
        cells += [f"{row['steps']:,.0f}", format_count(row["tokens"])]
        cells += [f"{row['tokens'] / own['tokens']:.2f}", f"{row['steps'] / own['steps']:.2f}", f"{low:.2g}-{high:.2g}"]
        rows.append((name, *cells))
    headings = ("global batch", "S / S_min", "E / E_min", "steps", "tokens", "time, same devices")
    yield plain_table((*headings, "time, devices as the batch", "lr x (Shuai et al. 2024)"), rows)
    yield "McCandlish et al. 2018: for a tuned learning rate at each batch, and one critical batch for the whole run"
    yield "\n".join(f"{key} = {value}" for key, value in plan.keys.items())


def batch_json(plan: BatchPlan) -> dict[str, Any]:
    """Return a plan in tokens and sequences."""
    along = [
        {"tokens": tokens, "critical_tokens": critical, "recommended": batch}
        for tokens, critical, batch in plan.stages()
    ]
    return {
        "name": plan.config.name,
        "parameters": parameter_count(plan.config.model),
        "tokens": plan.tokens,
        "seq_length": plan.seq_length,
        "micro_times_dp": plan.unit,
        "critical_tokens": plan.end,
        "critical_source": plan.source,
        "along": along,
        "trade_off": list(plan.trade_off()),
        "keys": plan.keys,
    }
