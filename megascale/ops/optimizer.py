"""Update rules of optimizers: their input (`Segment`), their interfaces (`Elementwise`, `NeedsParamNorms`), and the
backend with torch's rules (`TorchOptimizer`).

A rule sees a ZeRO shard as flat segments with arbitrary boundaries. The card's `unit_of_work` (`catalog.optimizers`)
tells the sharding layer if the rule is element-wise or scales updates by the norms of full parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.config.train import OptimizerConfig
from megascale.ops.select import OpBackend, OpContext


@dataclass(frozen=True)
class Segment:
    """A flat range of elements with equal treatment: `weight`, `grad` and `state` are [n] views of one dtype.

    `is_matrix`: elements of matrices, to which trust ratios apply. `weight_decay`: weight decay applies.
    """

    weight: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    is_matrix: bool
    weight_decay: bool


class Elementwise(Protocol):
    """An element-wise rule (unit_of_work = "elements"); segments may span parameters.

    `state_names`: state tensors per segment, initially zero.
    """

    state_names: tuple[str, ...]

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None: ...

    def step(self, lr: float, step: int, grad_factor: Tensor, skip: Tensor) -> None:
        """Update all segments with `grad_factor` times their gradients, and leave the gradients undefined.

        `step` counts from 1. `grad_factor`, f64, and `skip`, f32, are device scalars; with `skip` = 1 nothing changes.
        """


class NeedsParamNorms(Protocol):
    """A rule with norms of full parameters (unit_of_work = "param_norms"): two phases, an all-reduce between them. A
    segment is a shard's part of one parameter.
    """

    state_names: tuple[str, ...]

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None: ...

    def compute_updates(self, step: int, skip: Tensor) -> None:
        """Update the state, and overwrite the clipped gradients with update directions; `step`, `skip` as above."""

    def apply_updates(self, lr: float, norms: Tensor, skip: Tensor) -> None:
        """Update the weights along the directions. `norms` [2, n], f64: weight norms and direction norms of the full
        parameters of the n matrix segments.
        """


class TorchOptimizer(OpBackend):
    """Update rules from the catalog, including rules registered by other packages."""

    def build(self, context: OpContext) -> type[Any]:
        """Return an `Elementwise` or a `NeedsParamNorms` class."""
        return OPTIMIZERS[context.optimizer].load()
