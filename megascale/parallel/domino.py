"""Domino (Wang et al. 2024): the rows of a micro-batch in two halves, each computed during the other's tp collectives.

A module's `steps` yield where a tensor-parallel layer has computed or has started a collective. The halves take turns,
the leading one a step ahead; without halves `finish` runs the steps through. In and out: the GEMMs of column-parallel
and of row-parallel layers, with what lies between; / starts a collective, ! waits for it:

    leading     | out / |      | ! norm / |       | ! in |          | out / |
    following   |       | ! in |          | out / |      | ! norm / |       | ! in ...

Every collective has a step of the other half to itself, also across layers. Autograd runs backward in the reverse
order: what forward waits for, backward starts, and what forward starts, backward waits for. `EnterLayers` and
`LeaveLayers` are these places of a half, and an `Edge` what is in flight between one and the layer beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.comm.work import COMPLETED, Work
from megascale.parallel.linear_gemms import LinearGemms, Operand
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.segments import Steps, finish
from megascale.parallel.tp_overlap import TensorParallel
from megascale.record.label import Label


def in_halves(steps: Callable[[Tensor, MicroBatch, bool], Steps[Tensor]], x: Tensor, batch: MicroBatch) -> Tensor:
    """Compute steps(x, batch, leads) for both halves of the rows of x [s, b, h], of equal size, in turns."""
    parts = zip(x.chunk(2, 1), batch.halves, strict=True)
    leading, following = (steps(part.contiguous(), half, i == 0) for i, (part, half) in enumerate(parts))
    next(leading)
    while True:
        try:
            next(leading)
        except StopIteration as end:
            return torch.cat([end.value, finish(following)], 1)
        next(following)


@dataclass
class Edge:
    """Communication in flight beside a linear layer of a half: `gathering`, this rank's tokens of the operand of its
    GEMMs, and the all-gathered operand; `reducing`, which ends the reduction of its result.
    """

    gathering: tuple[Operand, tuple[Operand, Work]] | None = None
    reducing: Callable[[], object] = COMPLETED.wait

    def take_gathering(self) -> tuple[Operand, tuple[Operand, Work]]:
        """Return `gathering`, and hold its memory no longer."""
        taken, self.gathering = self.gathering, None
        assert taken is not None, "the step before has started it"
        return taken


class EnterLayers(torch.autograd.Function):
    """Start to all-gather the input x of column-parallel layers. Backward waits for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edge: Edge, gemms: LinearGemms, tp: TensorParallel, label: Label) -> Tensor:
        ctx.edge, operand = edge, gemms.input_operand(x)
        edge.gathering = operand, tp.gather_operand(operand, label, wait=False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.edge.reducing()
        return grads[0], None, None, None, None


class LeaveLayers(torch.autograd.Function):
    """Wait for the result of row-parallel layers. Backward starts to all-gather its gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, edge: Edge, gemms: LinearGemms, tp: TensorParallel, label: Label) -> Tensor:
        ctx.edge, ctx.arguments = edge, (gemms, tp, label.for_backward("gradient"))
        edge.reducing()
        edge.reducing = COMPLETED.wait  # the other one holds the result
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gemms, tp, label = ctx.arguments
        grad = grads[0].contiguous()
        operand = gemms.before_all_gather(grad)
        ctx.edge.gathering = operand, tp.gather_operand(operand, label, wait=False)
        return grad, None, None, None, None
