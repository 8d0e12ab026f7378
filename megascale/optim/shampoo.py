"""Shampoo with Adam's step size (Gupta et al. 2018, arXiv:1802.09568; Shi et al. 2023, arXiv:2309.06497).

    L = beta2 L + (1 - beta2) G G^T,  R = beta2 R + (1 - beta2) G^T G
    every `update_gap` steps:  A = (corrected L + eps I)^(-1/4), B = (corrected R + eps I)^(-1/4)
    M, V: Adam's moments
    X = A M B
    W = W - lr (X |Adam's direction| / |X| + weight_decay W)

The norm of Adam's direction ("grafting") makes AdamW's learning rate fit. A side longer than `max_size` has no factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.optimizer import Update, UpdateInput
from megascale.optim.adam import adam
from megascale.optim.soap import kronecker_factors, rotated

TINY = 1e-30
"""The least norm that divides."""


def shampoo(given: UpdateInput) -> Update:
    """Return the direction of a matrix [m, n], and moments, factors and their inverse roots."""
    o, state, step = given.options, given.state, given.step
    factors = kronecker_factors(given, o["beta2"])
    roots = {f"{side}_root": state[f"{side}_root"] for side in factors}
    if given.first or (step - 1) % o["update_gap"] == 0:
        corrected = 1 - o["beta2"] ** step
        roots = {f"{side}_root": inverse_root(factor / corrected, o["eps"]) for side, factor in factors.items()}
    grafted, moments = adam(given)
    x = rotated(moments["exp_avg"], roots["left_root"], roots["right_root"])
    return x * (grafted.norm() / x.norm().clamp(min=TINY)), {**moments, **factors, **roots}


def inverse_root(factor: Tensor, eps: float) -> Tensor:
    """Return (factor + eps I)^(-1/4) of a symmetric matrix without negative eigenvalues."""
    values, vectors = torch.linalg.eigh(factor)
    return vectors * (values.clamp(min=0.0) + eps).pow(-0.25) @ vectors.mT
