"""Backward from outputs, as torch's engine runs it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward


def run_backward(outputs: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor]) -> None:
    """Accumulate gradients into the leaves of `outputs`, tensors or their autograd edges. `grads`: of the outputs.

    `torch.autograd.backward` does the same after a check for which it imports sympy: half a second of a rank's start.
    The engine checks the gradient's shape as well. Megatron-LM calls the engine too (`custom_backward`).
    """
    _engine_run_backward(tuple(outputs), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)
