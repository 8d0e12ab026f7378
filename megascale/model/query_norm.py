"""Norms of queries and keys over a head or all heads: the model's `Norm`, or without a gain, or a tanh."""

from __future__ import annotations

from torch import Tensor, nn

from megascale.catalog.layers import NORMS
from megascale.model.modules import LayerContext, Norm
from megascale.ops.activation import scaled_tanh


class FixedNorm(nn.Module):
    """The model's norm, an RMS norm, over the last dimension with a gain of 1 that is not trained."""

    def __init__(self, context: LayerContext, name: str) -> None:
        super().__init__()
        self._eps = context.model.norm_eps
        self._weight = 1.0 - float(NORMS[context.model.norm].facts["offset"])
        self._normalize = context.operators.normalize

    def forward(self, x: Tensor) -> Tensor:
        return self._normalize(x, x.new_full(x.shape[-1:], self._weight), None, self._eps)


class ScaledTanh(nn.Module):
    """tanh(alpha x), element-wise, with one learned alpha for all heads (Zhu et al. 2025)."""

    def __init__(self, context: LayerContext, name: str) -> None:
        super().__init__()
        self.weight = context.parameters[f"{name}.weight"]

    def forward(self, x: Tensor) -> Tensor:
        return scaled_tanh(x, self.weight)


QueryNorm = Norm | FixedNorm | ScaledTanh


def query_norm(context: LayerContext, name: str) -> QueryNorm | None:
    """Build the norm of q or k that `model.qk_norm` asks for."""
    kind = context.model.qk_norm
    if kind == "none":
        return None
    kinds: dict[str, type[QueryNorm]] = {"fixed": FixedNorm, "tanh": ScaledTanh}
    return kinds.get(kind, Norm)(context, name)
