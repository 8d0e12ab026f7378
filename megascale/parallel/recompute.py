"""Computing again in the backward what the forward did not keep (Chen et al. 2016; Korthikanti et al. 2022, 4 and 5).

Dropout is drawn by name (`parallel.rng`), so that what is computed again is the same to the bit. Collectives in it are
issued again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Again(NamedTuple):
    """How to form a tensor once more, outside of autograd: function(x). Who keeps x for a backward has autograd save
    it, which lets go of it layer by layer; what a closure holds stays until the whole graph goes.
    """

    function: Callable[[Tensor], Tensor]
    x: Tensor


def recomputed(
    function: Callable[[Tensor], Tensor], x: Tensor, again: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """function(x), of which only x is kept. In the backward `again` is called, by default the function: it leads to the
    same gradients, and its value is not looked at.
    """
    return _Recomputed.apply(x, function, again or function)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], again: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.again = again
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = ctx.again(leaf)
        torch.autograd.backward(out, grads[0])
        return leaf.grad, None, None


def formed_again(function: Callable[[Tensor], Tensor], x: Tensor, wanted: bool) -> Again | None:
    """How function(x) can be formed once more by a layer that is not to keep it, if that is wanted."""
    return Again(function, x.detach()) if wanted else None
