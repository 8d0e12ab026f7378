"""CAME: Adafactor with momentum, divided by the momentum's instability (Luo et al. 2023, arXiv:2307.02047).

    U = G / sqrt(V) with V of rows and columns of G^2 + eps1, clipped as in Adafactor       beta2
    M = beta1 M + (1 - beta1) U
    S = instability (U - M)^2 + eps2, of rows and columns                                   beta3
    W = W - lr (M / sqrt(S) + weight_decay W)

Without bias correction. The authors use 0.5 to 0.9 times AdamW's learning rate.
"""

from __future__ import annotations

from megascale.ops.optimizer import Update, UpdateInput
from megascale.optim.contrib.adafactor import clipped, inverse_root


def came(given: UpdateInput) -> Update:
    """Return the momentum of a matrix [m, n] divided by its instability, and momentum and moments."""
    o, grad, state = given.options, given.grad, given.state
    squares = grad.square() + o["eps1"]
    row = state["row"].lerp(squares.mean(1), 1 - o["beta2"])
    column = state["column"].lerp(squares.mean(0), 1 - o["beta2"])
    update = clipped(grad * inverse_root(row, column), o["clip_threshold"])
    momentum = state["exp_avg"].lerp(update, 1 - o["beta1"])
    residual = (update - momentum).square() + o["eps2"]
    residual_row = state["residual_row"].lerp(residual.mean(1), 1 - o["beta3"])
    residual_column = state["residual_column"].lerp(residual.mean(0), 1 - o["beta3"])
    direction = momentum * inverse_root(residual_row, residual_column)
    moments = {"row": row, "column": column, "residual_row": residual_row, "residual_column": residual_column}
    return direction, {"exp_avg": momentum, **moments}
