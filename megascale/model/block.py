"""One transformer block: attention and MLP one after the other, or side by side."""

from __future__ import annotations

from torch import Tensor, nn

from megascale.config.model import ModelConfig
from megascale.model.attention import Attention
from megascale.model.mlp import MLP
from megascale.model.parts import Norm, Parameters, drop_branch
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.overlap import TensorAxis
from megascale.parallel.tensor import column_linears, row_linears


class SerialBlock(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(.)): the block of GPT-2 and Llama."""

    def __init__(self, model: ModelConfig, parameters: Parameters, index: int, axis: TensorAxis) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.attention_norm = Norm(model, parameters, f"{name}.attention_norm")
        self.attention = Attention(model, parameters, index, axis)
        self.mlp_norm = Norm(model, parameters, f"{name}.mlp_norm")
        self.mlp = MLP(model, parameters, index, axis)
        self._drop = lambda x, batch, branch: drop_branch(x, batch, f"{name}.{branch}", model, axis)

    def forward(self, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
        x_sbh = x_sbh + self._drop(self.attention(self.attention_norm(x_sbh), batch), batch, "attention.out")
        return x_sbh + self._drop(self.mlp(self.mlp_norm(x_sbh)), batch, "mlp.down")


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)) (Wang and Komatsuzaki 2021; MegaScale 3.1).

    Both branches begin with one gather of the same input and end in one sum over ranks, which travel under the MLP's
    products, the larger ones. Dropout is drawn for the sum of the branches.
    """

    def __init__(self, model: ModelConfig, parameters: Parameters, index: int, axis: TensorAxis) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.norm = Norm(model, parameters, f"{name}.norm")
        self.attention = Attention(model, parameters, index, axis)
        self.mlp = MLP(model, parameters, index, axis)
        self._axis = axis
        self._index = index
        self._drop = lambda x, batch: drop_branch(x, batch, name, model, axis)

    def forward(self, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
        attention, mlp, axis = self.attention, self.mlp, self._axis
        into = [attention.qkv.layer, mlp.up.layer]
        qkv, inner = column_linears(self.norm(x_sbh), into, axis, f"layer {self._index} qkv and up")
        branches = [attention.core(qkv, batch), mlp.activate(inner)]
        back = [attention.out.layer, mlp.down.layer]
        return x_sbh + self._drop(row_linears(branches, back, axis, f"layer {self._index} out and down"), batch)
