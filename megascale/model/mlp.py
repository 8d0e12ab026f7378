"""The feed-forward branch."""

from __future__ import annotations

from torch import Tensor, nn

from megascale.core.label import Label
from megascale.model.parts import Given, Linear
from megascale.parallel.recompute import Again, formed_again
from megascale.parallel.tensor import column_linear, row_linear


class MLP(nn.Module):
    """Up by a column-parallel product (with a gated activation gate and up at once), the activation, and back down."""

    def __init__(self, given: Given, index: int) -> None:
        super().__init__()
        name = f"layers.{index}.mlp"
        self.up = Linear(given, f"{name}.{'gate_up' if given.model.gated else 'up'}")
        self.down = Linear(given, f"{name}.down")
        self.activate = given.operators.activate
        self._axis = given.axis
        self._index = index
        self._recompute = given.recompute.activation

    def forward(self, x_sbh: Tensor, again: Again | None = None, value: bool = True) -> Tensor:
        """`again`: forms x again; `value`: whether the result is looked at (`row_linear`)."""
        axis, index = self._axis, self._index
        inner = column_linear(x_sbh, self.up.layer, axis, Label.of_layer(index, "up"), again)
        out = self.activate(inner)
        return row_linear(out, self.down.layer, axis, Label.of_layer(index, "down"), self.again(inner), value)

    def again(self, inner: Tensor) -> Again | None:
        """For the layer that the activation of `inner` goes to."""
        return formed_again(self.activate, inner, self._recompute)
