"""Norms of queries and keys over a head or all heads: the model's `Norm`, or without a gain, or a tanh."""

from __future__ import annotations

from torch import Tensor, nn

from megascale.catalog.layers import NORMS
from megascale.model.modules import LayerContext, Norm
from megascale.ops.activation import scaled_tanh
from megascale.parallel.sharded_norm import sharded_rms_norms
from megascale.record.label import Label


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


class QueryKeyNorms(nn.Module):
    """The norms of q and k that `model.qk_norm` asks for: over every head, or over all heads of all tp ranks."""

    def __init__(self, context: LayerContext, name: str, index: int) -> None:
        super().__init__()
        kinds: dict[str, type[Norm | FixedNorm | ScaledTanh]] = {"fixed": FixedNorm, "tanh": ScaledTanh}
        kind = kinds.get(context.model.qk_norm, Norm)
        self.q, self.k = (kind(context, f"{name}.{part}_norm") for part in "qk")
        self._model, self._tp = context.model, context.tp
        self._label = Label.for_layer(index, "qk norm")

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize q and k [s, b, heads, head_dim]."""
        if self._model.qk_norm != "full":
            return self.q(q), self.k(k)
        flat = q.flatten(2), k.flatten(2)
        if self._tp.size == 1:
            return self.q(flat[0]).view_as(q), self.k(flat[1]).view_as(k)
        assert isinstance(self.q, Norm) and isinstance(self.k, Norm)
        gains, offset = [self.q.weight, self.k.weight], NORMS[self._model.norm].facts["offset"]
        normed = sharded_rms_norms(flat, gains, self._model.norm_eps, self._tp, self._label, offset)
        return normed[0].view_as(q), normed[1].view_as(k)
