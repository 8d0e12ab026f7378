"""Conda: Adam's second moment in a basis of the momentum's singular vectors (Wang et al. 2025, arXiv:2509.24218).

    M = beta1 M + (1 - beta1) G
    every `update_gap` steps:  B = singular vectors of M on its shorter side [s, s]
    V = beta2 V + (1 - beta2) (B^T G)^2
    W = W - lr (scale corrected B (B^T M / (sqrt(V) + eps)) + weight_decay W)

A new basis does not rotate V. What singular momentum leaves open of it is fixed (`subspaces.completed`).
"""

from __future__ import annotations

import math

import torch

from megascale.ops.optimizer import Update, UpdateInput
from megascale.optim.contrib.subspaces import completed


def conda(given: UpdateInput) -> Update:
    """Return the direction of a matrix [m, n], and momentum, second moment and basis."""
    o, state = given.options, given.state
    exp_avg = state["exp_avg"].lerp(given.grad, 1 - o["beta1"])
    tall = exp_avg.shape[0] >= exp_avg.shape[1]
    grad, momentum = (x.mT if tall else x for x in (given.grad, exp_avg))
    basis = state["basis"]
    if given.first or given.step % o["update_gap"] == 0:
        left, values, _ = torch.linalg.svd(momentum, full_matrices=False)
        basis = completed(left, values)
    exp_avg_sq = state["exp_avg_sq"].lerp((basis.mT @ grad).square(), 1 - o["beta2"])
    back = basis @ (basis.mT @ momentum / (exp_avg_sq.sqrt() + o["eps"]))
    corrected = math.sqrt(1 - o["beta2"] ** given.step) / (1 - o["beta1"] ** given.step)
    direction = o["scale"] * corrected * (back.mT if tall else back)
    return direction, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "basis": basis}
