"""Activation recomputation: backward recomputes activations that forward did not save (Chen et al. 2016; Korthikanti et
al. 2022, 4 and 5).

Dropout masks depend on names alone (`parallel.rng`), which makes recomputation bit-equal. Collectives in a recomputed
function run twice. `recompute_in_backward` recomputes a function; a `Recomputation` recomputes the input of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge


def run_backward(outputs: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor]) -> None:
    """Accumulate gradients into the leaves of `outputs`, tensors or their autograd edges. `grads`: of the outputs.

    `torch.autograd.backward` does the same after a check for which it imports sympy: half a second of a rank's start.
    The engine checks the gradient's shape as well. Megatron-LM calls the engine too (`custom_backward`).
    """
    _engine_run_backward(tuple(outputs), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)


class Recomputation(NamedTuple):
    """A tensor to recompute as function(x), outside of autograd.

    The layer saves x with autograd's `save_for_backward`, which frees tensors layer by layer; a closure over x would
    hold its memory until the whole graph is freed.
    """

    function: Callable[[Tensor], Tensor]
    x: Tensor


def recompute_in_backward(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    recompute: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute function(x) and save only x for backward.

    Backward calls `recompute`, by default `function`: a function of equal gradients, whose output elements are unused.
    """
    return _Recomputed.apply(x, function, recompute or function)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        recompute: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.recompute = recompute
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return backward_of_recomputed(ctx.recompute, x, grads), None, None


def backward_of_recomputed(function: Callable[[Tensor], Tensor], x: Tensor, grads: Sequence[Tensor]) -> Tensor:
    """Compute function(x) again, and run its backward from its gradient `grads`; return the gradient of x."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        edge = get_gradient_edge(function(leaf))  # the result itself is freed
    run_backward([edge], grads)
    assert leaf.grad is not None, "the result depends on x"
    return leaf.grad


def recomputation(function: Callable[[Tensor], Tensor], x: Tensor, enabled: bool) -> Recomputation | None:
    """Describe how a layer recomputes its input function(x); None if not `enabled`: the layer saves its input."""
    return Recomputation(function, x.detach()) if enabled else None
