"""Metrics records: a logged step (`StepMetrics`), an evaluation (`EvaluationMetrics`), an alert (`Alert`), or an update
of a blend's weights (`MixtureUpdate`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

MOST_NAMED = 8  # most datasets in the line of an update


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of a logged step.

    - `samples`, `loss_tokens`: totals since the start of the run; loss tokens are tokens with a label in the loss,
      or the sum of their weights
    - times and throughputs: means over the steps since the last record, without evaluations and checkpoints
    - `tokens_per_s`: all processed tokens, the basis of FLOP/s, MFU and HFU; `loss_tokens_per_s`: loss tokens only
    - `mfu_*`, `hfu_*`: by convention (`plan.account.flops`); MFU and HFU differ under activation recomputation
    - `communication`: calls, bytes and exposed seconds per step, by axis, on rank 0
    - `noise_scale`: gradient noise scale in tokens, a moving average (`train.noise_scale`)
    - `fp8`: amax and shares of saturated and underflowing elements, by quantized operand
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    samples: int
    loss_tokens: float
    step_time_s: float
    tokens_per_s: float
    loss_tokens_per_s: float
    tflops_per_device: float
    mfu_full: float | None
    mfu_causal: float | None
    hfu_full: float | None
    hfu_causal: float | None
    peak_memory_bytes: int
    communication: dict[str, dict[str, float]]
    noise_scale: float | None = None
    fp8: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationMetrics:
    """An evaluation after `step`: the mean loss per token over `valid_tokens` tokens. `averaged_loss`: of the averaged
    weights, if there are any.
    """

    step: int
    valid_loss: float
    valid_tokens: int
    averaged_loss: float | None = None


@dataclass(frozen=True)
class Alert:
    """An alert after `step`: `alert` names a metric whose `value` is far above `recent`, its recent median."""

    step: int
    alert: str
    value: float
    recent: float

    def __str__(self) -> str:
        times = self.value / self.recent
        return f"{self.alert} {self.value:.4g} is {times:.3g} times its recent median {self.recent:.4g}"


@dataclass(frozen=True)
class MixtureUpdate:
    """An update of the blend's weights by a data policy after `step`. `mixture`: the new weight of each dataset and, if
    the policy uses losses, the mean loss per token since the last update, by its number and name. `place`: where in the
    order of samples the weights begin; None for weights as before.
    """

    step: int
    place: int | None
    mixture: dict[str, dict[str, float]]

    def __str__(self) -> str:
        if self.place is None:
            return "the data policy leaves the weights of the blend as they are"
        found = sorted(self.mixture.items(), key=lambda item: -item[1]["weight"])
        weights = ", ".join(f"{numbers['weight']:.3g} {name}" for name, numbers in found[:MOST_NAMED])
        more = f", {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        return f"weights from sample {self.place:,} on: {weights}{more}"


MetricsRecord = StepMetrics | EvaluationMetrics | Alert | MixtureUpdate


def as_json(record: MetricsRecord) -> dict[str, Any]:
    """Return the record's fields, without empty fields."""
    return {key: value for key, value in asdict(record).items() if value not in (None, {})}


def scalars(record: MetricsRecord) -> dict[str, float]:
    """Return the record's numbers in a flat dictionary, with keys such as communication/tp/bytes."""
    if isinstance(record, Alert):
        return {"step": record.step, record.alert: record.value}
    values: dict[str, float] = {}
    for key, value in as_json(record).items():
        if isinstance(value, dict):
            values |= {f"{key}/{axis}/{name}": number for axis, part in value.items() for name, number in part.items()}
        else:
            values[key] = value
    return values
