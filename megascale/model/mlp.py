"""The feed-forward branch."""

from __future__ import annotations

from torch import Tensor, nn

from megascale.catalog.layers import ACTIVATIONS
from megascale.config.model import ModelConfig
from megascale.model.parts import Linear, Parameters
from megascale.parallel.overlap import TensorAxis
from megascale.parallel.tensor import column_linear, row_linear


class MLP(nn.Module):
    """Up by a column-parallel product (with a gated activation gate and up at once), the activation, and back down."""

    def __init__(self, model: ModelConfig, parameters: Parameters, index: int, axis: TensorAxis) -> None:
        super().__init__()
        name = f"layers.{index}.mlp"
        self.up = Linear(parameters, f"{name}.{'gate_up' if model.gated else 'up'}")
        self.down = Linear(parameters, f"{name}.down")
        self.activate = ACTIVATIONS[model.activation].load()
        self._axis = axis
        self._index = index

    def forward(self, x_sbh: Tensor) -> Tensor:
        inner = column_linear(x_sbh, *self.up.layer, self._axis, f"layer {self._index} up")
        return row_linear(self.activate(inner), *self.down.layer, self._axis, f"layer {self._index} down")
