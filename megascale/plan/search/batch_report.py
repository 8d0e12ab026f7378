"""Reports of a plan of the global batch: tables for users, a JSON object for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from megascale.config.batch_rampup import BatchSizes
from megascale.config.run import RunConfig
from megascale.core.units import format_count
from megascale.plan.search.batch_laws import BEST_EXPONENT, CRITICAL_EXPONENT, LAWS, LR_EXPONENTS, Training, cost
from megascale.plan.search.batch_plan import Critical, NoiseCurve, fit_rampup, steps_of
from megascale.plan.search.report import plain_table

RATIOS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
"""Batches of the trade-off, over the critical one."""

STAGES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Shares of a training at which the batches are shown."""


@dataclass(frozen=True)
class Reference:
    """A run to scale from: its batch in `tokens`, and its `flops` without the head's."""

    tokens: float
    flops: float


@dataclass(frozen=True)
class BatchPlan:
    """A training with its critical batch, by `source`. `measured`: noise scales of the run `reference`."""

    config: RunConfig
    training: Training
    critical: Critical
    source: str
    measured: NoiseCurve | None
    reference: Reference | None

    @property
    def unit(self) -> int:
        """micro x dp, in sequences."""
        return self.config.batch.micro * self.config.dp

    @property
    def seq_length(self) -> int:
        return self.config.model.seq_length

    @property
    def end(self) -> float:
        """The critical batch at the end, in tokens."""
        return self.critical(self.training.tokens)

    @property
    def sizes(self) -> BatchSizes:
        """The recommended batches."""
        return fit_rampup(self.critical, self.training.tokens, self.seq_length, self.unit)

    def rows(self) -> Iterator[tuple[str, str, float, str]]:
        """Yield (source, formula, batch in tokens, where it holds) of measurements and laws."""
        if self.measured:
            tokens, scale = self.measured.tokens[-1], self.measured.scales[-1]
            formula = f"critical: noise scale after {format_count(tokens)} tokens"
            yield "McCandlish et al. 2018", formula, scale, "the run itself; an order of magnitude"
            formula = f"critical: that x (D / {format_count(tokens)})^{CRITICAL_EXPONENT}"
            yield "Zhang et al. 2024, Bergsma et al. 2025", formula, self.end, "85M to 3.3B parameters, one epoch"
        if self.reference:
            formula = f"best: the run's x (C / {self.reference.flops:.3g})^{BEST_EXPONENT}"
            batch = self.reference.tokens * (self.training.flops / self.reference.flops) ** BEST_EXPONENT
            yield "Shuai et al. 2024", formula, batch, "125M to 2.6B parameters, up to 300B tokens, best for the run"
        for law in LAWS:
            kind = "critical" if law.critical else "best"
            yield law.source, f"{kind}: {law.formula}", law.batch(self.training), law.valid

    def trade_off(self) -> Iterator[dict[str, float]]:
        """Yield batches in sequences with steps and tokens to the loss that this configuration is to reach."""
        own, critical = self.config.batch.total, self.end / self.seq_length
        least = self.training.tokens / cost(own, critical)[1]
        nearest = {max(1, round(critical * ratio / self.unit)) * self.unit for ratio in RATIOS}
        for batch in sorted({own, *nearest}):
            steps, tokens = cost(batch, critical)
            yield {
                "global": batch,
                "steps_over_least": steps,
                "tokens_over_least": tokens,
                "tokens": least * tokens,
                "steps": least * tokens / (batch * self.seq_length),
            }

    def stages(self) -> Iterator[tuple[float, float, int]]:
        """Yield (tokens, critical batch in tokens, recommended batch in sequences) along the training."""
        sizes = self.sizes
        for share in STAGES:
            tokens = share * self.training.tokens
            yield tokens, self.critical(tokens), sizes.at(int(tokens / self.seq_length))


def tables(plan: BatchPlan) -> Iterator[str | Table]:
    """Report a plan: inputs, laws, the batches along the training, the trade-off, and the keys."""
    training, length = plan.training, plan.seq_length
    yield (
        f"{plan.config.name}: {format_count(training.parameters)} parameters, {format_count(training.tokens)} tokens "
        f"in sequences of {length:,}, {training.flops:.3g} FLOPs without the head; micro x dp = {plan.unit}"
    )
    rows = [(s, f, format_count(b), f"{b / length:,.1f}", valid) for s, f, b, valid in plan.rows()]
    yield plain_table(("law", "batch", "tokens", "sequences", "fitted on"), rows)
    yield f"critical batch at the end: {format_count(plan.end)} tokens, {plan.source}"
    along = [
        (format_count(tokens), format_count(critical), f"{critical / length:,.1f}", f"{batch:,}")
        for tokens, critical, batch in plan.stages()
    ]
    yield plain_table(("after tokens", "critical, tokens", "sequences", "recommended batch"), along)
    yield _trade_off_table(plan)
    yield "McCandlish et al. 2018: for a tuned learning rate at each batch, and one critical batch for the whole run"
    yield "\n".join(f"{key} = {value}" for key, value in keys(plan).items())


def keys(plan: BatchPlan) -> dict[str, Any]:
    """Return the keys of the recommended batches, and the steps in which they read the tokens of the training."""
    sizes = plan.sizes
    steps = steps_of(sizes, max(1, round(plan.training.tokens / plan.seq_length)))
    rampup = {"batch.rampup": [sizes.start, sizes.increment, sizes.samples]} if sizes.samples else {}
    return {"batch.global": sizes.total} | rampup | {"train.steps": steps}


def _trade_off_table(plan: BatchPlan) -> Table:
    found = list(plan.trade_off())
    own = next(row for row in found if row["global"] == plan.config.batch.total)
    rows = []
    for row in found:
        low, high = sorted((row["global"] / own["global"]) ** exponent for exponent in LR_EXPONENTS)
        name = f"{row['global']:,.0f}{' (this configuration)' if row is own else ''}"
        cells = [f"{row['steps_over_least']:.2f}", f"{row['tokens_over_least']:.2f}"]
        cells += [f"{row['steps']:,.0f}", format_count(row["tokens"])]
        cells += [f"{row['tokens'] / own['tokens']:.2f}", f"{row['steps'] / own['steps']:.2f}", f"{low:.2g}-{high:.2g}"]
        rows.append((name, *cells))
    headings = ("global batch", "S / S_min", "E / E_min", "steps", "tokens", "time, same devices")
    return plain_table((*headings, "time, devices as the batch", "lr x (Shuai et al. 2024)"), rows)


def batch_json(plan: BatchPlan) -> dict[str, Any]:
    """Return a plan in tokens and sequences."""
    laws = [
        {"source": source, "formula": formula, "batch_tokens": batch, "valid": valid}
        for source, formula, batch, valid in plan.rows()
    ]
    along = [
        {"tokens": tokens, "critical_tokens": critical, "recommended": batch}
        for tokens, critical, batch in plan.stages()
    ]
    return {
        "name": plan.config.name,
        "parameters": plan.training.parameters,
        "tokens": plan.training.tokens,
        "seq_length": plan.seq_length,
        "micro_times_dp": plan.unit,
        "critical_tokens": plan.end,
        "critical_source": plan.source,
        "laws": laws,
        "along": along,
        "trade_off": list(plan.trade_off()),
        "keys": keys(plan),
    }
