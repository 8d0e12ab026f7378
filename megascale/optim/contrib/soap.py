"""SOAP: Adam in the eigenbases of Shampoo's factors (Vyas et al. 2024, arXiv:2409.11321).

    L = beta2 L + (1 - beta2) G G^T,  R = beta2 R + (1 - beta2) G^T G
    every `update_gap` steps:  A = eigenvectors of L, B of R, by a step of the power iteration and a QR decomposition
    M = beta1 M + (1 - beta1) G,  V = beta2 V + (1 - beta2) (A^T G B)^2
    W = W - lr (A (corrected A^T M B / (sqrt(V) + eps)) B^T + weight_decay W)

The first gradient only begins L and R: the weight stays as it is, without decay too. Columns of new bases are sorted by
eigenvalue, and V with them. Columns of eigenvalue 0, which the factors leave open, are fixed in the first bases
(`subspaces.completed`). The iteration is that of L + 1e-6 l I, with l the largest eigenvalue: it keeps the old columns
where the factors are 0 but for rounding. A side longer than `max_size` has no basis.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megascale.ops.optimizer import Update, UpdateInput
from megascale.optim.contrib.subspaces import FLOOR, completed


def soap(given: UpdateInput) -> Update:
    """Return the direction of a matrix [m, n], and moments, factors and bases."""
    o, grad, state, steps = given.options, given.grad, given.state, max(given.step - 1, 1)
    factors = kronecker_factors(given, o["beta2"])
    if given.first:
        sides = {"left": grad, "right": grad.mT}
        bases = {f"{side}_basis": first_basis(factor, sides[side]) for side, factor in factors.items()}
        moments = {name: state[name].clone() for name in ("exp_avg", "exp_avg_sq")}
        return torch.zeros_like(grad), {**moments, **factors, **bases}
    left, right = state["left_basis"], state["right_basis"]
    exp_avg = state["exp_avg"].lerp(grad, 1 - o["beta1"])
    exp_avg_sq = state["exp_avg_sq"].lerp(rotated(grad, left.mT, right).square(), 1 - o["beta2"])
    corrected = math.sqrt(1 - o["beta2"] ** steps) / (1 - o["beta1"] ** steps)
    scaled = corrected * rotated(exp_avg, left.mT, right) / (exp_avg_sq.sqrt() + o["eps"])
    direction = rotated(scaled, left, right.mT)
    if steps % o["update_gap"] == 0:
        left, order = next_basis(factors["left"], left)
        exp_avg_sq = exp_avg_sq[order] if len(order) > 1 else exp_avg_sq
        right, order = next_basis(factors["right"], right)
        exp_avg_sq = exp_avg_sq[:, order] if len(order) > 1 else exp_avg_sq
    return direction, {
        "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, **factors, "left_basis": left, "right_basis": right
    }  # fmt: skip


def kronecker_factors(given: UpdateInput, beta: float) -> dict[str, Tensor]:
    """Return Shampoo's factors, moving averages of G G^T and G^T G; of a side without basis [1, 1], as before."""
    grad, weight, found = given.grad, 1 - beta, dict[str, Tensor]()
    for side, x in (("left", grad), ("right", grad.mT)):
        before = given.state[side]
        found[side] = before.lerp(x @ x.mT, weight) if len(before) == len(x) else before.clone()
    return found


def rotated(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return left x right, without a factor [1, 1] of a longer side."""
    x = left @ x if len(left) == len(x) else x
    return x @ right if len(right) == x.shape[1] else x


def first_basis(factor: Tensor, grad: Tensor) -> Tensor:
    """Return the eigenvectors of the factor of a first gradient, of the largest eigenvalue first."""
    if len(factor) != len(grad):
        return torch.ones_like(factor)
    vectors, values, _ = torch.linalg.svd(grad, full_matrices=False)
    return completed(vectors, values)


def next_basis(factor: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return a basis closer to the eigenvectors of a factor, and the order of the old columns in it."""
    values, order = torch.einsum("ij,ik,kj->j", basis, factor, basis).sort(descending=True)
    basis = basis[:, order]
    return torch.linalg.qr(factor @ basis + FLOOR**2 * values[0] * basis).Q, order
