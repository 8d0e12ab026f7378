"""Where a weight's gradient goes.

Gradients accumulate over micro-batches in one contiguous buffer for each model chunk, in `main_grad`, a view of it.
Where both have the same format, the matrix product that forms a gradient adds to the buffer itself: no copy, and no
pass over the weights for each micro-batch. A parameter without `main_grad` gets its gradient from autograd, as usual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.embedding import add_rows_


def add_product(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Add grad^T x to the gradient of `weight` [n, k]; grad [t, n], x [t, k]. Returns it if autograd must keep it."""
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is None:
        return grad.t() @ x
    if main.dtype == grad.dtype:
        torch.addmm(main, grad.t(), x, out=main)
    else:
        main += grad.t() @ x
    return None


def add_gradient(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """Add to the gradient of `weight`, in any format. Returns it, in the weight's, if autograd must keep it."""
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is None:
        return gradient.to(weight.dtype)
    main += gradient
    return None


def add_sum(bias: Tensor, grad: Tensor) -> Tensor | None:
    """Add the sum over rows of grad [t, n] to the gradient of `bias` [n]. Returns it if autograd must keep it."""
    main: Tensor | None = getattr(bias, "main_grad", None)
    if main is None:
        return grad.sum(0)
    main += grad.sum(0, dtype=main.dtype)
    return None


def add_rows(table: Tensor, index: Tensor, grad: Tensor) -> Tensor | None:
    """Add row i of grad [t, h] to row index[i] of the gradient of `table`. Returns it if autograd must keep it."""
    main: Tensor | None = getattr(table, "main_grad", None)
    into = torch.zeros_like(table) if main is None else main
    add_rows_(into, index, grad.to(into.dtype))
    return into if main is None else None
