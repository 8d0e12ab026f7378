"""A plan of the global batch (`BatchPlan`): the critical batch along a training, measured or by a law, and a ramp-up;
with its reports (`batch_tables`, `batch_json`).

The critical batch is where a smaller batch needs few more tokens and a larger one few fewer steps (McCandlish et al.
2018, equation 2.11):

    S / S_min = 1 + B_crit / B    steps to a loss, over those of the largest batch
    E / E_min = 1 + B / B_crit    tokens to a loss, over those of the smallest batch

docs/planning.md has other published laws.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from megascale.config.batch_rampup import BatchSizes
from megascale.config.run import RunConfig
from megascale.core.errors import DataError
from megascale.core.units import format_count
from megascale.layout.parameters import describe_parameters, parameter_count
from megascale.plan.account.flops import head_flops, token_flops
from megascale.plan.search.report import plain_table

CRITICAL_EXPONENT = 0.47
"""The critical batch grows with this power of the tokens of a run, whatever its parameters: 0.47 (Zhang et al. 2024),
0.462 (Power Lines, Bergsma et al. 2025).
"""

MOST_LEVELS = 16  # most increments of a ramp-up
GRID = 50  # points of a training at which a ramp-up is compared with the critical batch
RATIOS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)  # batches of the trade-off, over the critical one
STAGES = (0.01, 0.03, 0.1, 0.3, 1.0)  # shares of a training at which the batches are shown
LR_EXPONENTS = (0.75, 1.0)  # the best learning rate grows with a power of the batch in this range (Shuai et al. 2024)

Critical = Callable[[float], float]
"""The critical batch, in tokens, as a function of the tokens of a training that came before."""


def predicted_loss(parameters: float, tokens: float) -> float:
    """Predict the loss in nats per token (Hoffmann et al. 2022, approach 3): for compute-optimal models of 70M to 16B
    parameters on MassiveText, of an ordinary batch.
    """
    return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28


def kaplan_critical(loss: float) -> float:
    """The critical batch in tokens at a loss in nats per token (Kaplan et al. 2020, equation 1.4), fitted up to 1.5B
    parameters on WebText2 with a vocabulary of 50,257.
    """
    return 2e8 / float(loss ** (1 / 0.21))


def critical_by_law(parameters: float, end: float, loss: float | None = None) -> Critical:
    """The critical batch by Kaplan et al., at the predicted loss, or at the `end` of a training at the loss given."""
    return lambda tokens: kaplan_critical(
        loss if loss is not None and tokens >= end else predicted_loss(parameters, min(tokens, end))
    )


@dataclass(frozen=True)
class NoiseCurve:
    """Noise scales of a run, in tokens, after `tokens` of its training, ascending."""

    tokens: Sequence[float]
    scales: Sequence[float]

    def critical(self, tokens: float) -> float:
        """The noise scale after `tokens`: interpolated, and beyond the run's end by the law of tokens. Before the first
        measurement it is the first.
        """
        if tokens >= self.tokens[-1]:
            return self.scales[-1] * (tokens / self.tokens[-1]) ** CRITICAL_EXPONENT
        after = bisect.bisect_right(self.tokens, tokens)
        if after == 0:
            return self.scales[0]
        (a, b), (low, high) = self.tokens[after - 1 : after + 1], self.scales[after - 1 : after + 1]
        return low + (high - low) * (tokens - a) / (b - a)


def read_measured(metrics: Path) -> NoiseCurve:
    """Read the noise scales of a run from its metrics file, past lines that a full disk has cut.

    Raises: DataError if it cannot be read or has none
    """
    found: dict[float, float] = {}
    try:
        with open(metrics, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if not isinstance(record, dict):
                    continue
                if isinstance(record.get("noise_scale"), (int, float)) and record.get("loss_tokens", 0) > 0:
                    found[float(record["loss_tokens"])] = float(record["noise_scale"])
    except OSError as error:
        raise DataError(f"{metrics} cannot be read: {error.strerror}", hint="name the folder of a run") from None
    if not found:
        hint = "train with train.noise_scale_every; as long as noise hides the gradient there is no value"
        raise DataError(f"{metrics} has no noise_scale", hint=hint)
    tokens = sorted(found)
    return NoiseCurve(tokens, [found[key] for key in tokens])


def cost(batch: float, critical: float) -> tuple[float, float]:
    """Return (S / S_min, E / E_min) of a batch, in the unit of the critical one."""
    return 1 + critical / batch, 1 + batch / critical


def steps_of(sizes: BatchSizes, samples: int) -> int:
    """The steps in which a training reads `samples` samples."""
    return bisect.bisect_left(range(1, samples // min(sizes.start, sizes.total) + 3), samples, key=sizes.before_step)


def fit_rampup(critical: Critical, tokens: float, seq_length: int, unit: int) -> BatchSizes:
    """Return the batches, in sequences, that follow the critical batch of a training of `tokens` best: by the mean
    square of log(batch / critical) at equally distant tokens. All are multiples of `unit`.

    The last batch is at most the critical batch at the end, or `unit`.
    """
    points = [(index + 0.5) / GRID * tokens for index in range(GRID)]
    targets = [max(critical(point) / seq_length, 1e-9) for point in points]
    samples = tokens / seq_length
    end = max(unit, math.floor(critical(tokens) / seq_length / unit) * unit)
    candidates = [BatchSizes(end, end, end, 0)]
    for start in sorted({max(unit, end * share // 16 // unit * unit) for share in range(16)}):
        if start < end:
            step = unit * math.ceil((end - start) / unit / MOST_LEVELS)
            total = start + (end - start) // step * step
            candidates += [BatchSizes(total, start, step, math.ceil(samples * share / 10)) for share in range(1, 11)]

    def distance(sizes: BatchSizes) -> float:
        batches = (sizes.at(int(point / seq_length)) for point in points)
        return sum(math.log(batch / target) ** 2 for batch, target in zip(batches, targets, strict=True))

    return min(candidates, key=distance)


@dataclass(frozen=True)
class BatchPlan:
    """A training of `tokens` with its critical batch, by `source`."""

    config: RunConfig
    tokens: float
    critical: Critical
    source: str

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
        return self.critical(self.tokens)

    @cached_property
    def sizes(self) -> BatchSizes:
        return fit_rampup(self.critical, self.tokens, self.seq_length, self.unit)

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of the recommended batches, and the steps in which they read the tokens of the training."""
        sizes = self.sizes
        steps = steps_of(sizes, max(1, round(self.tokens / self.seq_length)))
        rampup = {"batch.rampup": [sizes.start, sizes.increment, sizes.samples]} if sizes.samples else {}
        return {"batch.global": sizes.total} | rampup | {"train.steps": steps}

    def trade_off(self) -> Iterator[dict[str, float]]:
        """Yield batches in sequences with steps and tokens to the loss that this configuration is to reach."""
        own, critical = self.config.batch.total, self.end / self.seq_length
        least = self.tokens / cost(own, critical)[1]
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
        for share in STAGES:
            tokens = share * self.tokens
            yield tokens, self.critical(tokens), self.sizes.at(int(tokens / self.seq_length))


def batch_tables(plan: BatchPlan) -> Iterator[str | Table]:
    """Report a plan: inputs, the batches along the training, the trade-off, and the keys."""
    model, length = plan.config.model, plan.seq_length
    flops = plan.tokens * (token_flops(model).full - head_flops(model))
    yield (
        f"{plan.config.name}: {describe_parameters(model)}, {format_count(plan.tokens)} tokens "
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
