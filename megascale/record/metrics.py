"""Metrics records: a logged step (`StepMetrics`), an evaluation (`EvaluationMetrics`), the sharpness of logits
(`SharpnessMetrics`), an alert (`Alert`), an update of a blend's weights (`MixtureUpdate`), or a start with rebuilt
stages (`RebuiltStages`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

MOST_NAMED = 8  # most datasets in the line of an update


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of a logged step. Times and throughputs are means over the steps since the last record, without
    evaluations and checkpoints; MFU and HFU by convention (`plan.account.flops`).
    """

    step: int
    """step, from 1"""
    loss: float
    """mean loss of the step"""
    grad_norm: float
    """norm of the gradients before clipping"""
    lr: float
    """learning rate of the step"""
    samples: int
    """samples since the start of the run"""
    loss_tokens: float
    """tokens with a label in the loss since the start of the run, or the sum of their weights"""
    step_time_s: float
    """seconds of a step"""
    tokens_per_s: float
    """processed tokens per second of all ranks, the basis of FLOP/s, MFU and HFU"""
    loss_tokens_per_s: float
    """tokens with a label in the loss per second"""
    tflops_per_device: float
    """model TFLOP/s of a device, full convention"""
    mfu_full: float | None
    """model FLOPs utilization; attention counts the full matrix"""
    mfu_causal: float | None
    """the same; attention counts half of the matrix"""
    hfu_full: float | None
    """hardware FLOPs utilization, with activation recomputation; full convention"""
    hfu_causal: float | None
    """the same, causal convention"""
    peak_memory_bytes: int
    """peak memory of rank 0's device so far"""
    communication: dict[str, dict[str, float]]
    """calls, bytes of the full tensors and exposed seconds (`exposed_s`) per step, by axis or of `sites`, on rank 0"""
    noise_scale: float | None = None
    """gradient noise scale in tokens, a moving average (`train.noise_scale`)"""
    kept_updates: float | None = None
    """share of the step's updates of compensated weights that rounding keeps, 1 for all (`optim.compensated`)"""
    fp8: dict[str, dict[str, float]] = field(default_factory=dict)
    """by quantized operand `amax`, shares of elements that are `saturated` or `underflow`, `rms` and `kurtosis`"""
    experts: dict[str, dict[str, float]] = field(default_factory=dict)
    """by layer the largest `load` of an expert, relative to the mean; of the routers their losses, `balance` and `z`,
    and the share of choices that are `dropped`"""
    mtp: dict[str, dict[str, float]] = field(default_factory=dict)
    """mean `loss` of each depth of multi-token prediction, without its weight"""
    exits: dict[str, dict[str, float]] = field(default_factory=dict)
    """mean `loss` of each early exit, by the number of layers before it, without its weight"""
    objectives: dict[str, dict[str, float]] = field(default_factory=dict)
    """of `distillation` (the KL to the teacher) and each auxiliary objective, the mean `loss` over its own `count`"""


@dataclass(frozen=True)
class EvaluationMetrics:
    """An evaluation after a step."""

    step: int
    """step before the evaluation"""
    valid_loss: float
    """mean loss per token"""
    valid_tokens: int
    """tokens of the evaluation"""
    averaged_loss: float | None = None
    """the same loss of the averaged weights, if there are any"""


@dataclass(frozen=True)
class SharpnessMetrics:
    """A measurement of the sharpness of logits after a step."""

    step: int
    """step before the measurement"""
    logit_sharpness: float
    """rise of the loss of held-out tokens at the worst point of a small box around their logits, in percent"""


@dataclass(frozen=True)
class Alert:
    """A spike: a metric far above its recent median; or a statistic of FP8 casts beyond its limit."""

    step: int
    """step of the spike"""
    alert: str
    """name of the metric, `loss`, `grad_norm`, `logit_sharpness`, or a statistic of an operand"""
    value: float
    """value of the metric"""
    recent: float
    """recent median, of a loss or gradient norm that of the last `fault.spike_window` steps"""

    def __str__(self) -> str:
        times = f"{self.value / self.recent:.3g} times" if self.recent else "above"
        return f"{self.alert} {self.value:.4g} is {times} its recent median {self.recent:.4g}"


@dataclass(frozen=True)
class MixtureUpdate:
    """An update of the blend's weights by a data policy after a step."""

    step: int
    """step before the update"""
    place: int | None
    """first sample with the new weights; absent if the weights stay"""
    mixture: dict[str, dict[str, float]]
    """new `weight` and, if the policy uses losses, mean `loss` per token since the last update, by dataset"""

    def __str__(self) -> str:
        if self.place is None:
            return "the data policy leaves the weights of the blend as they are"
        found = sorted(self.mixture.items(), key=lambda item: -item[1]["weight"])
        weights = ", ".join(f"{numbers['weight']:.3g} {name}" for name, numbers in found[:MOST_NAMED])
        more = f", {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        return f"weights from sample {self.place:,} on: {weights}{more}"


@dataclass(frozen=True)
class RebuiltStages:
    """A start with the state of lost pipeline stages rebuilt from their neighbours."""

    step: int
    """step of the state"""
    rebuilt: dict[str, dict[str, float]]
    """shares of the two neighbours by rebuilt stage, both counted from 0"""

    def __str__(self) -> str:
        means = [
            f"stage {stage} as {' + '.join(f'{share:.3g} x stage {of}' for of, share in shares.items())}"
            for stage, shares in self.rebuilt.items()
        ]
        return f"state of lost pipeline stages was rebuilt, {', '.join(means)}"


MetricsRecord = StepMetrics | EvaluationMetrics | SharpnessMetrics | Alert | MixtureUpdate | RebuiltStages


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
