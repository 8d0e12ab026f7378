"""Backward from an output, as torch's engine runs it."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward


def run_backward(output: Tensor | GradientEdge, grad: Tensor) -> None:
    """Accumulate gradients into the leaves of `output`, a tensor or its autograd edge. `grad`: of the output.

    `torch.autograd.backward` does the same after a check for which it imports sympy: half a second of a rank's start.
    The engine checks the gradient's shape as well. Megatron-LM calls the engine too (`custom_backward`).
    """
    _engine_run_backward((output,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)
