"""Shared modules of the network: `Linear` parameters and `Norm`, and the context that modules are built from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megascale.config.model import ModelConfig
from megascale.layout.recompute_policy import NO_RECOMPUTE, RecomputePolicy
from megascale.model.layer_ops import LayerOps
from megascale.parallel.experts.grouped_linear import HIGH_PRECISION_GROUPS, GroupedGemms
from megascale.parallel.linear_gemms import HIGH_PRECISION_GEMMS, LinearGemms
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.recompute import Recomputation, recomputation
from megascale.parallel.tp_overlap import LinearParams, TensorParallel

if TYPE_CHECKING:
    from megascale.parallel.activation_store import ActivationStore
    from megascale.parallel.context_parallel import ContextParallel
    from megascale.parallel.experts.expert_parallel import ExpertParallel

Parameters = Mapping[str, nn.Parameter]
"""This rank's parameters by global name (`layout.tensors`)."""


@dataclass(frozen=True)
class LayerContext:
    """The arguments common to all modules: model configuration, parameters of this rank, tp group, operators, GEMMs
    of a linear layer by its name and of experts by the number of their layer, recomputation policy, the attention of
    ranks that share a sequence, the store of what blocks save, and the parallelism of experts.
    """

    model: ModelConfig
    parameters: Parameters
    tp: TensorParallel
    operators: LayerOps
    linear_gemms: Callable[[str], LinearGemms] = lambda layer: HIGH_PRECISION_GEMMS
    grouped_gemms: Callable[[int], GroupedGemms] = lambda layer: HIGH_PRECISION_GROUPS
    recompute: RecomputePolicy = NO_RECOMPUTE
    cp: ContextParallel | None = None
    store: ActivationStore | None = None
    experts: ExpertParallel | None = None


class Linear(nn.Module):
    """The weight and bias of a linear layer, without a forward: `parallel.tensor` computes."""

    def __init__(self, context: LayerContext, name: str) -> None:
        super().__init__()
        self.weight = context.parameters[f"{name}.weight"]
        self.bias = context.parameters.get(f"{name}.bias")
        self.params = LinearParams(self.weight, self.bias, context.linear_gemms(name))


class Norm(nn.Module):
    """The configured norm (LayerNorm or RMSNorm) over the last dimension. `eps`: by default the model's."""

    def __init__(self, context: LayerContext, name: str, eps: float | None = None) -> None:
        super().__init__()
        self.weight = context.parameters[f"{name}.weight"]
        self.bias = context.parameters.get(f"{name}.bias")
        self._eps = context.model.norm_eps if eps is None else eps
        self._normalize = context.operators.normalize
        self._add_normalize = context.operators.add_normalize
        self._recompute = context.recompute.norm

    def forward(self, x: Tensor) -> Tensor:
        return self._normalize(x, self.weight, self.bias, self._eps)

    def add_norm(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Add a branch to the residual stream x; return the sum and the norm of the sum."""
        return self._add_normalize(x, branch, self.weight, self.bias, self._eps)

    def recompute_norm(self, x: Tensor) -> Recomputation | None:
        """Describe how the next layer recomputes its input norm(x); None if the layer saves its input."""
        return recomputation(self, x, self._recompute)


def add_branch(x_sbh: Tensor, branch: Tensor, tau: float) -> Tensor:
    """Add a branch to the residual stream [s, b, h]. `tau`: its share of the variance (Narayan et al. 2025, equation
    11), or 0 for a sum.
    """
    if not tau:
        return x_sbh + branch
    return (x_sbh * math.sqrt(1 - tau)).add_(branch, alpha=math.sqrt(tau))


def residual_dropout(x_sbh: Tensor, batch: MicroBatch, place: str, context: LayerContext) -> Tensor:
    """Apply dropout to a residual tensor [s, b, h], sharded along s with sequence parallelism."""
    first = context.tp.index * x_sbh.shape[0] if context.tp.activations_sharded else 0
    return batch.dropout.hidden_dropout(x_sbh, place, first, context.model.seq_length)
