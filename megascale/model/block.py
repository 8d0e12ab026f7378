"""One transformer block."""

from __future__ import annotations

from torch import Tensor, nn

from megascale.config.model import ModelConfig
from megascale.model.attention import Attention
from megascale.model.mlp import MLP
from megascale.model.parts import Norm, Parameters, drop_branch
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.tensor import TensorAxis


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
