"""GradNormLoRP: weight normalisation with low-rank gradients (Huang et al. 2024, arXiv:2412.19616). Experimental.

    W = g V / |V| by row (output feature); in the beginning V = W, g = |W|
    dg = sum over a row of G V / |V|,   dV = g / |V| (G - dg V / |V|)
    g = g - lr Adam(dg)
    V = V - lr scale P Adam(P^T dV)                     GaLore's step (`contrib.galore`), of dV
    W = g V / |V| - lr weight_decay W

W gives g and the direction of V: only |V| is state, with the sign of g. The authors' code has a full V as state, sets g
to |V| in every step, and keeps the part of dV along V. A row of zeros stays zero. State of r (2 l + s) + 3 m elements.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megascale.ops.optimizer import Update, UpdateInput
from megascale.optim.adam import adam
from megascale.optim.contrib.galore import galore
from megascale.optim.contrib.weight_change import direction_of

TINY = 1e-30  # the least norm that divides


def grad_norm_lorp(given: UpdateInput) -> Update:
    """Return the direction of a matrix [m, n]; GaLore's state of V, the lengths of its rows, and the moments of g."""
    state, weight, lr = given.state, given.weight, given.lr
    assert weight is not None, "the card asks for the weight"
    size = weight.norm(dim=1)
    length = size if given.first else state["length"]
    sign = torch.where(length < 0, -1.0, 1.0).to(weight)
    magnitude, length = sign * size, length.abs()
    to_unit = sign / size.clamp(min=TINY)  # from rows of W to those of V / |V|
    grad_magnitude = to_unit * (weight * given.grad).sum(1)
    tangent = given.grad - rows(grad_magnitude * to_unit, weight)
    step, kept = galore(replace(given, grad=tangent.mul_((magnitude / length.clamp(min=TINY)).unsqueeze(1))))
    of_magnitude = {"exp_avg": state["magnitude_avg"], "exp_avg_sq": state["magnitude_avg_sq"]}
    magnitude_step, moments = adam(replace(given, grad=grad_magnitude, state=of_magnitude))
    magnitude = magnitude - lr * magnitude_step
    moved = rows(length * to_unit, weight).sub_(step, alpha=lr)
    length = moved.norm(dim=1)
    change = rows(magnitude / length.clamp(min=TINY), moved).sub_(weight)
    return direction_of(change, lr), {
        **kept, "length": torch.where(magnitude < 0, -length, length),
        "magnitude_avg": moments["exp_avg"], "magnitude_avg_sq": moments["exp_avg_sq"],
    }  # fmt: skip


def rows(factors: Tensor, x: Tensor) -> Tensor:
    """Scale the rows of a matrix [m, n] by factors [m]."""
    return factors.unsqueeze(1) * x
