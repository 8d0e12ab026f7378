"""REG: Muon with rows and columns scaled in place of the matrix sign (Liu et al. 2025, arXiv:2510.03691).

    B = momentum B + (1 - momentum) G
    X = momentum B + (1 - momentum) G                          nesterov; else B
    repeat `iterations` times:  rows of X, then columns of X, divided by their root mean squares
    W = W - lr (scale X / rms(X) + weight_decay W)

The paper's abstract names the scaling and its alignment with AdamW's root mean square, 0.2; the norm and the number of
passes are this project's choice.
"""

from __future__ import annotations

from megascale.ops.optimizer import Update, UpdateInput
from megascale.optim.contrib.adafactor import root_mean_square
from megascale.optim.contrib.sinkgd import EPS, equalized


def reg(given: UpdateInput) -> Update:
    """Return the scaled momentum of a matrix [m, n], and the momentum."""
    o, grad = given.options, given.grad
    momentum = given.state["momentum"].lerp(grad, 1 - o["momentum"])
    blend = grad.lerp(momentum, o["momentum"]) if o["nesterov"] else momentum
    x = equalized(blend, o["iterations"])
    return o["scale"] * x / root_mean_square(x).clamp(min=EPS), {"momentum": momentum}
