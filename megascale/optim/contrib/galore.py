"""GaLore: Adam in a subspace of the gradient (Zhao et al. 2024, arXiv:2403.03507), for G [s, l] with s <= l.

    P [s, r]: a basis of the subspace (`contrib.subspaces`), by default singular vectors of G every `update_gap` steps
    R = P^T G,  N = Adam(R)
    W = W - lr (scale P N + weight_decay W)

With `residual` = "fira" (Chen et al. 2024, arXiv:2410.01623) the rest of the gradient takes part, scaled for each
column as Adam scales the subspace, and its norm grows by 1% a step at most:

    W = W - lr (scale (P N + (G - P R) |N| / |R|) + weight_decay W)

With `natural` the projected gradient is that of natural gradient descent (Natural GaLore, Das 2024): R times
the inverse of lambda I + H^T H, where H are the last `history` projected gradients, as vectors, by Woodbury's formula.
State of r (2 l + s) elements; `natural` adds history x r l, which with 20 is more than Adam's 2 s l for r > s / 11.
Every rank of a job has the same basis: the owner computes it of the whole gradient. A `rank` above the shorter side
counts as that side. Moments outlive a basis.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megascale.ops.optimizer import Update, UpdateInput
from megascale.optim.contrib.subspaces import SUBSPACES

GROWTH, EPS = 1.01, 1e-8
"""The most growth of the residual's norm in a step, and a small addend of norms that divide; Fira's."""

LAMBDA = 1e-3  # damping of the empirical Fisher matrix; Natural GaLore's


def galore(given: UpdateInput) -> Update:
    """Return the direction of a matrix [m, n]; and moments, the subspace, and what `residual` and `natural` keep."""
    o, state = given.options, given.state
    tall, subspace = given.grad.shape[0] >= given.grad.shape[1], SUBSPACES[o["subspace"]]
    grad = given.grad.mT if tall else given.grad
    kept = subspace.update(grad, given)
    low = projected = subspace.project(kept, grad)
    if o["natural"]:
        low, kept["history"] = natural_gradient(projected, state["history"], given.step)
    kept["exp_avg"] = state["exp_avg"].lerp(low, 1 - o["beta1"])
    kept["exp_avg_sq"] = state["exp_avg_sq"].lerp(low.square(), 1 - o["beta2"])
    direction = kept["exp_avg"] / (kept["exp_avg_sq"].sqrt() + o["eps"])
    full = subspace.back(kept, direction, len(grad))
    if o["residual"] == "fira":
        rest = grad - subspace.back(kept, projected, len(grad))
        scaled = rest * (direction.norm(dim=0) / (projected.norm(dim=0) + EPS))
        scaled, kept["residual_norm"] = limited(scaled, state["residual_norm"])
        full = full + scaled
    corrected = math.sqrt(1 - o["beta2"] ** given.step) / (1 - o["beta1"] ** given.step)
    return o["scale"] * corrected * (full.mT if tall else full), kept


def limited(residual: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Limit the growth of the residual's norm over the norm `before` [1], 0 in the first step."""
    norm = residual.norm().view(1)
    growth = (norm / (before + EPS)).clamp(min=GROWTH) / GROWTH
    divisor = torch.where(before > 0, growth, torch.ones_like(growth))
    return residual / divisor, norm / divisor


def natural_gradient(low: Tensor, history: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return (LAMBDA I + H^T H)^-1 of a projected gradient [r, l], and the history [h, r, l] with it; H [h, r l]."""
    kept = history.clone()
    kept[(step - 1) % len(kept)] = low
    rows = kept.flatten(1)
    small = LAMBDA * torch.eye(len(rows), dtype=low.dtype, device=low.device) + rows @ rows.mT
    solved = torch.linalg.solve(small, rows @ low.reshape(-1))
    return (low - (solved @ rows).view_as(low)) / LAMBDA, kept
