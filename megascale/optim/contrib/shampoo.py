"""Shampoo with Adam's step size (Gupta et al. 2018, arXiv:1802.09568; Shi et al. 2023, arXiv:2309.06497).

    L = beta2 L + (1 - beta2) G G^T,  R = beta2 R + (1 - beta2) G^T G
    every `update_gap` steps:  A = (L / l + damping I)^(-1/4), B = (R / r + damping I)^(-1/4), l, r: largest eigenvalues
    M, V: Adam's moments
    X = A M B, for the first `update_gap` - 1 steps Adam's direction
    W = W - lr (X |Adam's direction| / |X| + weight_decay W)

The norm of Adam's direction ("grafting") makes AdamW's learning rate fit. Damping relative to the largest eigenvalue,
and a start with Adam's direction until the factors have filled, are those of Anil et al. 2020 (arXiv:2002.09018): roots
of a single gradient, which may be singular, would enlarge what rounding leaves of eigenvalue 0. A side longer than
`max_size` has no factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.optimizer import Update, UpdateInput
from megascale.optim.adam import adam
from megascale.optim.contrib.soap import kronecker_factors, rotated

TINY = 1e-30  # the least norm that divides


def shampoo(given: UpdateInput) -> Update:
    """Return the direction of a matrix [m, n], and moments, factors and their inverse roots."""
    o, state, step = given.options, given.state, given.step
    factors = kronecker_factors(given, o["beta2"])
    roots = {f"{side}_root": state[f"{side}_root"] for side in factors}
    if step % o["update_gap"] == 0 and not given.first:
        roots = {f"{side}_root": inverse_root(factor, o["damping"]) for side, factor in factors.items()}
    grafted, moments = adam(given)
    x = rotated(moments["exp_avg"], roots["left_root"], roots["right_root"])
    norm = x.norm()  # 0 without roots
    direction = torch.where(norm > 0, x * (grafted.norm() / norm.clamp(min=TINY)), grafted)
    return direction, {**moments, **factors, **roots}


def inverse_root(factor: Tensor, damping: float) -> Tensor:
    """Return (F + damping I)^(-1/4) of a symmetric matrix without negative eigenvalues, divided by its largest: F."""
    values, vectors = torch.linalg.eigh(factor)
    relative = values.clamp(min=0.0) / values[-1].clamp(min=TINY)
    return vectors * (relative + damping).pow(-0.25) @ vectors.mT
