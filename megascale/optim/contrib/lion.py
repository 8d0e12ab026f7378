"""Lion: the sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675).

    W = W - lr (sign(beta1 M + (1 - beta1) G) + weight_decay W)
    M = beta2 M + (1 - beta2) G

Every element moves by lr: the authors use a third to a tenth of AdamW's rate, and as much more weight decay.
"""

from __future__ import annotations

from megascale.ops.optimizer import Update, UpdateInput


def lion(given: UpdateInput) -> Update:
    """Return the sign of the interpolated momentum, and the momentum."""
    o, grad, momentum = given.options, given.grad, given.state["momentum"]
    return momentum.lerp(grad, 1 - o["beta1"]).sign(), {"momentum": momentum.lerp(grad, 1 - o["beta2"])}
