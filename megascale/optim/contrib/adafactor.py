"""Adafactor: a second moment of rows and columns (Shazeer and Stern 2018, arXiv:1804.04235), without momentum.

    b = 1 - step^-decay
    R = b R + (1 - b) mean over columns of (G^2 + eps1)         [m]
    C = b C + (1 - b) mean over rows of (G^2 + eps1)            [n]
    U = G / sqrt(R C / mean(R)),  U = U / max(1, rms(U) / clip_threshold)
    W = W - lr (max(eps2, rms(W)) U + weight_decay W)

Without `scale_parameter` the factor of the weight's root mean square is 1, and weights stay where they are stored.
"""

from __future__ import annotations

from torch import Tensor

from megascale.ops.optimizer import Update, UpdateInput


def adafactor(given: UpdateInput) -> Update:
    """Return the clipped update of a matrix [m, n], and the moments of its rows and columns."""
    o, grad = given.options, given.grad
    weight = given.step ** -o["decay"]  # of the newest gradient
    squares = grad.square() + o["eps1"]
    row = given.state["row"].lerp(squares.mean(1), weight)
    column = given.state["column"].lerp(squares.mean(0), weight)
    update = clipped(grad * inverse_root(row, column), o["clip_threshold"])
    if o["scale_parameter"]:
        assert given.weight is not None, "the card asks for the weight"
        update = update * root_mean_square(given.weight).clamp(min=o["eps2"])
    return update, {"row": row, "column": column}


def inverse_root(row: Tensor, column: Tensor) -> Tensor:
    """Return 1 / sqrt(V) of the factored second moment V = row column / mean(row), [m, n]."""
    return (row / row.mean()).rsqrt().unsqueeze(1) * column.rsqrt().unsqueeze(0)


def clipped(update: Tensor, threshold: float) -> Tensor:
    """Scale an update whose root mean square is above a threshold down to the threshold."""
    return update / (root_mean_square(update) / threshold).clamp(min=1.0)


def root_mean_square(x: Tensor) -> Tensor:
    """Return the root mean square of all elements."""
    return x.square().mean().sqrt()
