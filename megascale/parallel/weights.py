"""Where a weight's gradient goes.

Gradients accumulate over micro-batches in one contiguous buffer for each model chunk, in `main_grad`, a view of it. The
GEMM that forms a weight's gradient adds to the buffer itself where it can (`ops.wgrad`). The first part of a step is
written over what the last step has left, so no gradient is zeroed before. A parameter without `main_grad` gets its
gradient from autograd, as usual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.embedding import add_rows_
from megascale.ops.wgrad import Wgrad, add_, torch_wgrad


class Accumulation:
    """How a parameter's gradient adds up; its attribute `accumulation`. `begun`: whether `main_grad` holds a part of
    the sum, and not something that is to be written over.
    """

    __slots__ = ("begun", "wgrad")

    def __init__(self, wgrad: Wgrad, begun: bool = False) -> None:
        self.wgrad = wgrad
        self.begun = begun

    def adds(self) -> bool:
        """Whether the part that follows is added, or is the first. From here on the sum has begun."""
        begun, self.begun = self.begun, True
        return begun


_BEGUN = Accumulation(torch_wgrad, begun=True)
"""Of a parameter with `main_grad` alone."""


def add_product(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Add grad^T x to the gradient of `weight` [n, k]; grad [t, n], x [t, k]. Returns it if autograd must keep it."""
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is None:
        return grad.t() @ x
    accumulation: Accumulation = getattr(weight, "accumulation", _BEGUN)
    accumulation.wgrad(main, grad, x, accumulation.adds())
    return None


def add_gradient(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """Add to the gradient of `weight`, in any format. Returns it, in the weight's, if autograd must keep it."""
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is None:
        return gradient.to(weight.dtype)
    if _adds(weight):
        add_(main, gradient)
    else:
        main.copy_(gradient)
    return None


def add_sum(bias: Tensor, grad: Tensor) -> Tensor | None:
    """Add the sum over rows of grad [t, n] to the gradient of `bias` [n]. Returns it if autograd must keep it."""
    main: Tensor | None = getattr(bias, "main_grad", None)
    if main is None:
        return grad.sum(0)
    if _adds(bias):
        main += grad.sum(0, dtype=main.dtype)
    else:
        torch.sum(grad, 0, dtype=main.dtype, out=main)
    return None


def add_rows(table: Tensor, index: Tensor, grad: Tensor) -> Tensor | None:
    """Add row i of grad [t, h] to row index[i] of the gradient of `table`. Returns it if autograd must keep it."""
    main: Tensor | None = getattr(table, "main_grad", None)
    into = torch.zeros_like(table) if main is None else main
    if main is not None and not _adds(table):
        main.zero_()
    add_rows_(into, index, grad.to(into.dtype))
    return into if main is None else None


def _adds(parameter: Tensor) -> bool:
    accumulation: Accumulation = getattr(parameter, "accumulation", _BEGUN)
    return accumulation.adds()
