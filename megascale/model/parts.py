"""What every part of the network is given, and the two parts that all others use: linear weights and norms."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megascale.catalog.layers import NORMS
from megascale.config.model import ModelConfig
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.overlap import TensorAxis
from megascale.parallel.tensor import Layer

Parameters = Mapping[str, nn.Parameter]
"""This rank's parameters by the name in `layout.tensors`."""


class Linear(nn.Module):
    """The weight and bias of a linear layer; `parallel.tensor` multiplies with them."""

    def __init__(self, parameters: Parameters, name: str) -> None:
        super().__init__()
        self.weight = parameters[f"{name}.weight"]
        self.bias = parameters.get(f"{name}.bias")

    @property
    def layer(self) -> Layer:
        return self.weight, self.bias


class Norm(nn.Module):
    """The configured norm over the last dimension."""

    def __init__(self, model: ModelConfig, parameters: Parameters, name: str) -> None:
        super().__init__()
        self.weight = parameters[f"{name}.weight"]
        self.bias = parameters.get(f"{name}.bias")
        self._eps = model.norm_eps
        self._normalize = NORMS[model.norm].load()

    def forward(self, x: Tensor) -> Tensor:
        return self._normalize(x, self.weight, self.bias, self._eps)


def drop_branch(x_sbh: Tensor, batch: MicroBatch, place: str, model: ModelConfig, axis: TensorAxis) -> Tensor:
    """Dropout on a tensor of the residual stream, which sequence parallelism cuts along dimension 0."""
    first = axis.index * x_sbh.shape[0] if axis.cut else 0
    return batch.dropout.hidden(x_sbh, place, first, model.seq_length)
