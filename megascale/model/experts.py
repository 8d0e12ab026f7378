"""The experts of a block, in place of its MLP (mixture of experts)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megascale.comm.collectives import labelled_pieces
from megascale.model.mlp import MLP
from megascale.model.modules import LayerContext
from megascale.parallel.experts.dispatcher import Dispatcher, InFlight, start_exchange
from megascale.parallel.experts.grouped_linear import grouped_linear, router_logits
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.segments import Steps
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

    def steps(self, residual: Tensor, x_sbh: Tensor, batch: MicroBatch) -> Steps[tuple[Tensor, Tensor]]:
        """Map x [s, b, h] to [s, b, h] in segments, which pass on the `residual` stream; return it and the result.
        Several blocks of tokens are one segment.
        """
        x = x_sbh.reshape(-1, x_sbh.shape[-1])
        logits = router_logits(x, self.router, self.router_bias)
        weights, dispatchers = self._experts.route(logits, batch, self._index)
        blocks = self._dispatched(x, weights, dispatchers)
        in_flight, out, arriving = list[InFlight](), list[Tensor](), next(blocks, None)
        one = arriving if len(dispatchers) == 1 else None
        if one is not None:
            residual, x_sbh, scalar = yield residual, x_sbh, one[0].scalar
            arriving = one[0]._replace(scalar=scalar), one[1]
        while arriving is not None:  # backward runs in the reverse order, with the same overlap
            out += [in_flight.pop(0).tokens()] if len(in_flight) == 2 else []
            following = next(blocks, None)
            in_flight.append(self._computed(*arriving))
            arriving = following
        if one is not None:
            residual, x_sbh, scalar = yield residual, x_sbh, in_flight[0].scalar
            in_flight[0] = in_flight[0]._replace(scalar=scalar)
        shared = None if self.shared is None else (yield from self._shared(x_sbh, batch))  # overlaps the exchange
        out += [each.tokens() for each in in_flight]
        routed = (out[0] if len(out) == 1 else torch.cat(out)).view_as(x_sbh)
        return residual, routed if shared is None else routed + shared

    def _dispatched(
        self, x: Tensor, weights: Tensor, dispatchers: tuple[Dispatcher, ...]
    ) -> Iterator[tuple[InFlight, Label]]:
        """Start to send block after block of the tokens, and return the label of its way back."""
        count = len(dispatchers)
        parts = [(x,), (weights,)] if count == 1 else [each.split(len(each) // count) for each in (x, weights)]
        ways = (Label.for_layer(self._index, way) for way in ("dispatch", "combine"))
        labels = ([label for _, label in labelled_pieces(count, count, way)] for way in ways)
        for tokens, slots, dispatcher, label, back in zip(*parts, dispatchers, *labels, strict=True):
            yield start_exchange(tokens, slots, dispatcher, label, self._up_gemms.cast_tokens), back

    def _computed(self, arriving: InFlight, label: Label) -> InFlight:
        """Compute the experts of a block, and start to send the results back."""
        dispatcher, (rows, weights) = arriving.exchange.dispatcher, arriving.rows()
        groups, factors = dispatcher.groups, None if self.down_bias is None else weights
        up = grouped_linear(rows, self.up, groups, self.up_bias, gemms=self._up_gemms)
        del rows  # of which codes may be saved instead
        inner = self._activate(up)
        inner = inner * weights.to(inner.dtype)
        rows = grouped_linear(inner, self.down, groups, self.down_bias, factors, self._down_gemms)
        del inner
        return start_exchange(rows, None, dispatcher, label)

    def _shared(self, x_sbh: Tensor, batch: MicroBatch) -> Steps[Tensor]:
        assert self.shared is not None
        out = yield from self.shared.steps(x_sbh, batch)
        if self.shared_gate is None:
            return out
        gate = torch.sigmoid(router_logits(x_sbh.reshape(-1, x_sbh.shape[-1]), self.shared_gate))
        return out * gate.to(out.dtype).view(*out.shape[:-1], 1)
