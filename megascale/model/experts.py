"""The experts of a block, in place of its MLP (mixture of experts)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megascale.model.mlp import MLP
from megascale.model.modules import LayerContext
from megascale.parallel.experts.exchange import dispatch, finish_combine, start_combine
from megascale.parallel.experts.grouped_linear import grouped_linear, router_logits
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.recompute import Recomputation
from megascale.record.label import Label


class Experts(nn.Module):
    """A token's MLP is the weighted sum of the experts that its router chooses, plus the shared expert's:

    y = sum over chosen e of D_e(w_e activate(up_e(x))) + w_e b_e + shared(x)

    The weight multiplies the input of the down projection D, which saves its output for backward otherwise, and its
    bias b.
    """

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__()
        name, model = f"layers.{index}", context.model
        up, parameters = "gate_up" if model.gated else "up", context.parameters
        self.router = parameters[f"{name}.router.weight"]
        self.up, self.down = (parameters[f"{name}.experts.{layer}.weight"] for layer in (up, "down"))
        self.router_bias = parameters.get(f"{name}.router.bias")
        self.up_bias, self.down_bias = (parameters.get(f"{name}.experts.{layer}.bias") for layer in (up, "down"))
        self.shared = MLP(context, index, "shared") if model.shared_ffn_size else None
        self.shared_gate = parameters.get(f"{name}.shared_gate.weight")
        assert context.experts is not None, "a model with experts has their parallelism"
        self._experts = context.experts
        self._activate = context.operators.activate
        self._index = index
        self._up_gemms, self._down_gemms = (context.grouped_gemms(index) for _ in range(2))

    def forward(
        self,
        x_sbh: Tensor,
        batch: MicroBatch,
        recompute_input: Recomputation | None = None,
        compute_output: bool = True,
    ) -> Tensor:
        """Map x [s, b, h] to [s, b, h]. x is saved for the router, and not recomputed. The output is computed in any
        case: the gate's gradient needs the shared expert's.
        """
        x = x_sbh.reshape(-1, x_sbh.shape[-1])
        logits = router_logits(x, self.router, self.router_bias)
        experts, weights, exchange = self._experts.route(logits, batch, self._index)
        label = Label.for_layer(self._index, "dispatch")
        rows, weights = dispatch(x, weights, exchange, label)
        inner = grouped_linear(rows, self.up, exchange.groups, self.up_bias, gemms=self._up_gemms)
        inner = self._activate(inner) * weights.to(x.dtype)
        rows = grouped_linear(inner, self.down, exchange.groups, self.down_bias, weights, self._down_gemms)
        label = Label.for_layer(self._index, "combine")
        started, flight = start_combine(rows, exchange, label)
        shared = None if self.shared is None else self._shared(x_sbh, batch)  # overlaps the exchange
        out = finish_combine(started, flight, exchange, experts.shape[1], label).view_as(x_sbh)
        return out if shared is None else out + shared

    def _shared(self, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
        assert self.shared is not None
        out = self.shared(x_sbh, batch)
        if self.shared_gate is None:
            return out
        gate = torch.sigmoid(router_logits(x_sbh.reshape(-1, x_sbh.shape[-1]), self.shared_gate))
        return out * gate.to(out.dtype).view(*out.shape[:-1], 1)
