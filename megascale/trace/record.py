"""One line of metrics: a logged step, or an evaluation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    """A logged step. `samples` and `loss_tokens`, tokens whose label counts in the loss, are counted since the run
    began. `tokens_per_s`: tokens processed, loss tokens or not; FLOP/s, MFU and HFU follow from it. All times and
    speeds are means over the steps since the last record, without evaluations and checkpoints. MFU and HFU are named by
    their convention (`account.flops`); they differ where something is recomputed. `communication`: calls, bytes and
    exposed seconds a step of each axis on rank 0. `fp8`: of each operand that is cast the largest magnitude, and the
    shares of its elements that saturate or underflow.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    samples: int
    loss_tokens: int
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
    fp8: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationRecord:
    """An evaluation after `step`: the mean loss a token over `valid_tokens` tokens."""

    step: int
    valid_loss: float
    valid_tokens: int


Record = StepRecord | EvaluationRecord


def as_json(record: Record) -> dict[str, Any]:
    """The record's fields, without those that have no value."""
    return {key: value for key, value in asdict(record).items() if value not in (None, {})}


def scalars(record: Record) -> dict[str, float]:
    """The record's numbers under one name each, such as communication/tp/bytes."""
    found: dict[str, float] = {}
    for key, value in as_json(record).items():
        if isinstance(value, dict):
            found |= {f"{key}/{axis}/{name}": number for axis, part in value.items() for name, number in part.items()}
        else:
            found[key] = value
    return found
