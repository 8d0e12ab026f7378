"""Adam-mini: Adam with one second moment for each block of weights (Zhang et al. 2024, arXiv:2406.16793).

    V = beta2 V + (1 - beta2) mean of G^2 over a block
    W = W - lr (corrected M / (sqrt(corrected V) + eps) + weight_decay W)

Blocks are the heads of q and k, and the rows (output features) of other matrices. A head's moment stands in all of its
rows: the state is one number a row.
"""

from __future__ import annotations

from torch import Tensor

from megascale.ops.optimizer import Update, UpdateInput

BY_HEAD = ("q.weight", "q_rope.weight", "k.weight")  # ends of the names of matrices with a block a head


def adam_mini(given: UpdateInput) -> Update:
    """Return Adam's direction with second moments of blocks, and the moments."""
    beta = given.options["beta1"]
    exp_avg = given.state["exp_avg"].lerp(given.grad, 1 - beta)
    exp_avg_sq, root = block_moment(given)
    return exp_avg / (1 - beta**given.step) / root.unsqueeze(1), {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def block_moment(given: UpdateInput) -> tuple[Tensor, Tensor]:
    """Return the second moments of the rows of a matrix [m, n], equal in a block, and what divides the rows: [m]."""
    o, grad = given.options, given.grad
    rows = given.head_dim if given.head_dim and given.name.endswith(BY_HEAD) else 1
    blocks = grad.square().view(-1, rows * grad.shape[1]).mean(1)
    exp_avg_sq = given.state["exp_avg_sq"].lerp(blocks.repeat_interleave(rows), 1 - o["beta2"])
    return exp_avg_sq, (exp_avg_sq / (1 - o["beta2"] ** given.step)).sqrt() + o["eps"]
