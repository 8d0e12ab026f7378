"""One transformer block: attention and MLP one after the other, or side by side."""

from __future__ import annotations

from torch import Tensor, nn

from megascale.core.label import Label
from megascale.model.attention import Attention
from megascale.model.mlp import MLP
from megascale.model.parts import Given, Norm, drop_branch
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.tensor import column_linears, row_linears


class SerialBlock(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(.)): the block of GPT-2 and Llama."""

    def __init__(self, given: Given, index: int) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.attention_norm = Norm(given, f"{name}.attention_norm")
        self.attention = Attention(given, index)
        self.mlp_norm = Norm(given, f"{name}.mlp_norm")
        self.mlp = MLP(given, index)
        self._drop = lambda x, batch, branch: drop_branch(x, batch, f"{name}.{branch}", given)

    def forward(self, x_sbh: Tensor, batch: MicroBatch, value: bool = True) -> Tensor:
        """`value`: whether the result is looked at; otherwise only its gradients are those of a block."""
        branch = self.attention(self.attention_norm(x_sbh), batch, self.attention_norm.again(x_sbh))
        x_sbh, normed = self.mlp_norm.of_sum(x_sbh, self._drop(branch, batch, "attention.out"))
        branch = self.mlp(normed, self.mlp_norm.again(x_sbh), value)
        return x_sbh + self._drop(branch, batch, "mlp.down")


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)) (Wang and Komatsuzaki 2021; MegaScale 3.1).

    Both branches begin with one gather of the same input and end in one sum over ranks, which travel under the MLP's
    products, the larger ones. Dropout is drawn for the sum of the branches.
    """

    def __init__(self, given: Given, index: int) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.norm = Norm(given, f"{name}.norm")
        self.attention = Attention(given, index)
        self.mlp = MLP(given, index)
        self._axis = given.axis
        self._index = index
        self._drop = lambda x, batch: drop_branch(x, batch, name, given)

    def forward(self, x_sbh: Tensor, batch: MicroBatch, value: bool = True) -> Tensor:
        """`value`: whether the result is looked at; otherwise only its gradients are those of a block."""
        attention, mlp, axis = self.attention, self.mlp, self._axis
        into, what = [attention.qkv.layer, mlp.up.layer], Label.of_layer(self._index, "qkv and up")
        qkv, inner = column_linears(self.norm(x_sbh), into, axis, what, self.norm.again(x_sbh))
        branches = [attention.core(qkv, batch), mlp.activate(inner)]
        back, what = [attention.out.layer, mlp.down.layer], Label.of_layer(self._index, "out and down")
        return x_sbh + self._drop(row_linears(branches, back, axis, what, [None, mlp.again(inner)], value), batch)
