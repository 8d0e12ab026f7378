"""Update rules of optimizers: their interfaces, and the backends `TorchOptimizer` and `TritonOptimizer`.

- `UpdateRule`: a function from `UpdateInput` to a direction and the new state, for elements and for whole matrices.
  The sharding layer (`optim.sharded`) clips, steps along the direction, decays weights and skips steps.
- `Elementwise`, `NeedsParamNorms`: classes over `Segment`s of a shard, for fused kernels; they name their state.

The card's `unit_of_work` (`catalog.optimizers`) tells the sharding layer what a rule sees at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.config.train import OptimizerConfig
from megascale.ops.library import triton_unsupported_reason
from megascale.ops.select import OpBackend, OpContext


@dataclass(frozen=True)
class UpdateInput:
    """The input of an `UpdateRule`.

    `grad`: the clipped gradient, [n] elements or a matrix [m, n], in the optimizer's dtype. `state`: tensors by name,
    initially zero, in the shapes that the card declares. `step` counts from 1. `options`: the card's, with the values
    of the configuration. `weight`: like `grad`, if the card asks for it. `head_dim`: rows of an attention head in a
    matrix that is a stack of heads. `name`: a matrix's global name; empty for elements. `first`: a matrix's state is
    zero, in the first step or after another rule. `lr`: the learning rate, for rules that compute the new weight.
    `dtype`: of the weights in GEMMs: bf16, or in runs in fp32 and fp64 that of `grad`.
    """

    grad: Tensor
    state: Mapping[str, Tensor]
    step: int
    options: Mapping[str, Any]
    weight: Tensor | None = None
    head_dim: int | None = None
    name: str = ""
    first: bool = False
    lr: float = 0.0
    dtype: torch.dtype = torch.float32


Update = tuple[Tensor, dict[str, Tensor]]
"""The direction, of which the weight loses the learning rate times as much, and the new state, no views of the old."""

UpdateRule = Callable[[UpdateInput], Update]
"""A rule as a function without side effects. An element-wise one may be called with any range of elements."""


@dataclass(frozen=True)
class Segment:
    """A flat range of elements with equal treatment: `weight`, `grad` and `state` are [n] views of one dtype.

    `is_matrix`: elements of matrices, to which trust ratios apply. `weight_decay`: weight decay applies. `residual`: of
    compensated weights (`optim.compensated`), [n]; only functions have such segments. `rounded`: the weights in the
    dtype of GEMMs, [n], if that is another one; written by a class with `writes_rounded`, otherwise by the caller.
    """

    weight: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    is_matrix: bool
    weight_decay: bool
    residual: Tensor | None = None
    rounded: Tensor | None = None


class Elementwise(Protocol):
    """An element-wise rule (unit_of_work = "elements"); segments may span parameters.

    `state_names`: state tensors per segment, initially zero. A class that writes its segments' `rounded` has an
    attribute `writes_rounded`, True.
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


Rule = UpdateRule | type[Elementwise] | type[NeedsParamNorms]
"""A rule of any form."""


def is_function(rule: Rule) -> TypeGuard[UpdateRule]:
    """Return False for a class over segments, which names its state."""
    return not hasattr(rule, "state_names")


class TorchOptimizer(OpBackend):
    """Update rules from the catalog, including rules registered by other packages."""

    def build(self, context: OpContext) -> Rule:
        """Return the rule that the context names."""
        rule: Rule = OPTIMIZERS[context.optimizer].load()
        return rule


class TritonOptimizer:
    """AdamW by a Triton kernel."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return triton_unsupported_reason(context.device)

    def build(self, context: OpContext) -> type[Elementwise]:
        from megascale.ops.triton_adamw import TritonAdamW

        return TritonAdamW
