"""The MLP (feed-forward) branch of a block."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megascale.model.modules import LayerContext, Linear
from megascale.ops.planned_cast import plan_casts
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.recompute import Recomputation, recomputation
from megascale.parallel.segments import Steps, finish, run_through
from megascale.parallel.tensor import column_parallel_steps, row_parallel_steps
from megascale.parallel.tiles import run_in_tiles
from megascale.record.label import Label


class MLP(nn.Module):
    """MLP: a column-parallel up layer (with the gate, if gated), the activation, a row-parallel down layer. With
    several `tiles`, one tile of tokens at a time (`parallel.tiles`). `place`: its name in the layer.
    """

    def __init__(self, context: LayerContext, index: int, place: str = "mlp") -> None:
        super().__init__()
        name = f"layers.{index}.{place}"
        self.up = Linear(context, f"{name}.{'gate_up' if context.model.gated else 'up'}")
        self.down = Linear(context, f"{name}.down")
        self._activate = context.operators.activate
        self._tp = context.tp
        prefix = "" if place == "mlp" else f"{place} "
        self._up_label, self._down_label = (Label.for_layer(index, f"{prefix}{part}") for part in ("up", "down"))
        self._recompute = context.recompute.activation
        self.tiles, self._stored_tiles = context.recompute.mlp_tiles, context.recompute.stored_tiles

    def steps(
        self,
        x_sbh: Tensor,
        batch: MicroBatch,
        recompute_input: Recomputation | None = None,
        compute_output: bool = True,
    ) -> Steps[Tensor]:
        """Map x [s, b, h] to [s, b, h]. `recompute_input` recomputes x for wgrad; `compute_output` as in
        `row_parallel_steps`.
        """
        if self.tiles > 1:
            tiles = partial(self._run_tile, batch), x_sbh, self.tiles
            return run_in_tiles(*tiles, recompute_input, compute_output, self._stored_tiles)
        (inner,) = yield from self.project(x_sbh, batch, recompute_input)
        return (yield from self._down(inner, batch, self.recompute_activation(inner, batch), compute_output))

    forward = run_through(steps)

    def _run_tile(self, batch: MicroBatch, x_sbh: Tensor, compute_output: bool) -> Tensor:
        return finish(self._down(finish(self.project(x_sbh, batch))[0], batch, None, compute_output))

    def _down(
        self, inner: Tensor, batch: MicroBatch, recompute_input: Recomputation | None, compute_output: bool
    ) -> Steps[Tensor]:
        rows = [self.activate(batch, inner)], [self.down.params.of(batch)]
        return row_parallel_steps(*rows, self._tp, self._down_label, [recompute_input], compute_output)

    def activate(self, batch: MicroBatch, inner: Tensor) -> Tensor:
        """Apply the activation, whose kernel may cast for the layers around it."""
        up, down = (layer.params.gemms.of(batch) for layer in (self.up, self.down))
        plan_casts(inner, down.planned_cast("input"), up.planned_cast("gradient"))
        return self._activate(inner)

    def project(
        self, x_sbh: Tensor, batch: MicroBatch, recompute_input: Recomputation | None = None
    ) -> Steps[tuple[Tensor, ...]]:
        """Map x [s, b, h] to this rank's input of the activation [s, b, ...]. `recompute_input` as in `forward`."""
        return column_parallel_steps(x_sbh, [self.up.params.of(batch)], self._tp, self._up_label, recompute_input)

    def recompute_activation(self, inner: Tensor, batch: MicroBatch) -> Recomputation | None:
        """Describe how the down layer recomputes its input activate(inner); None if the layer saves its input."""
        return recomputation(partial(self.activate, batch), inner, self._recompute)
