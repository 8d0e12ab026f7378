"""SinkGD: gradients whose rows and columns have equal norms, without state (Scetbon et al. 2025, arXiv:2502.06742).

    repeat `iterations` times:  X = sqrt(n) X / |rows of X|,  then  X = sqrt(m) X / |columns of X|
    W = W - lr (scale X + weight_decay W)

X has a root mean square of 1; `scale`, 0.2 by default, gives updates the size of AdamW's, whose rate fits then.
"""

from __future__ import annotations

import math

from torch import Tensor

from megascale.ops.optimizer import Update, UpdateInput

EPS = 1e-30  # the least norm by which a row or column is divided


def sinkgd(given: UpdateInput) -> Update:
    """Return the normalized gradient of a matrix [m, n]."""
    return given.options["scale"] * equalized(given.grad, given.options["iterations"]), {}


def equalized(x: Tensor, iterations: int) -> Tensor:
    """Give rows and then columns of x [m, n] a root mean square of 1, several times."""
    rows, columns = x.shape
    for _ in range(iterations):
        x = math.sqrt(columns) * x / x.norm(dim=1, keepdim=True).clamp(min=EPS)
        x = math.sqrt(rows) * x / x.norm(dim=0, keepdim=True).clamp(min=EPS)
    return x
