"""AdaPM: Adam-mini with momentum only where it pays (Zhang et al. 2025, arXiv:2510.09103).

    momentum = "full"       M = beta1 M + (1 - beta1) G
    momentum = "none"       M = G
    momentum = "low_rank"   M = beta1 P C + (1 - beta1) G,  P [s, r] by a step of subspace iteration on M,  C = P^T M
                            and the direction is of  P C + (G - P P^T G)
    V = beta2 V + (1 - beta2) mean of G^2 over a block
    W = W - lr (M / (sqrt(corrected V) + eps) + weight_decay W)

By default v has full momentum, attention's output and embeddings have none, and other matrices have low rank. Outside
of the subspace the gradient stands for its average, which it is in expectation: so the mean of M is not too small. The
paper says that it corrects a bias, and not how; this correction is this project's. With full rank it is Adam-mini.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.optimizer import Update, UpdateInput
from megascale.optim.contrib.adam_mini import block_moment
from megascale.optim.contrib.subspaces import FLOOR, completed


def ada_pm(given: UpdateInput) -> Update:
    """Return Adam-mini's direction with partial momentum, and the moments."""
    o, grad = given.options, given.grad
    correction = 1 - o["beta1"] ** given.step
    if o["momentum"] == "none":
        momentum, kept = grad, dict[str, Tensor]()
    elif o["momentum"] == "full":
        kept = {"exp_avg": given.state["exp_avg"].lerp(grad, 1 - o["beta1"])}
        momentum = kept["exp_avg"] / correction
    else:
        momentum, kept = low_rank_momentum(given, correction)
    exp_avg_sq, root = block_moment(given)
    return momentum / root.unsqueeze(1), {**kept, "exp_avg_sq": exp_avg_sq}


def low_rank_momentum(given: UpdateInput, correction: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the corrected momentum of a matrix [m, n], and the basis and the coefficients that are kept."""
    grad, beta, start = given.grad, given.options["beta1"], given.state["basis"]
    tall = grad.shape[0] >= grad.shape[1]
    short = grad.mT if tall else grad
    whole = (beta * start @ given.state["coefficients"]).add(short, alpha=1 - beta)
    if given.first:
        left, values, _ = torch.linalg.svd(whole, full_matrices=False)
        start = completed(left, values)[:, : start.shape[1]]
    ahead = whole @ (whole.mT @ start)
    basis = torch.linalg.qr(ahead + FLOOR**2 * ahead.norm() * start).Q  # `start` where M is singular
    coefficients = basis.mT @ whole
    momentum = basis @ (coefficients / correction) + (short - basis @ (basis.mT @ short))
    return momentum.mT if tall else momentum, {"basis": basis, "coefficients": coefficients}
