"""CompAct: Adam in a random subspace, in which linear layers keep their inputs (Shamshoum et al. 2024,
arXiv:2410.15352).

For Y = X W^T with W [n, k], and P [k, r] of independent normal elements with variance 1 / r, so that E[P P^T] = I:

    forward    saved: X P [t, r], in place of X [t, k]; summed over tp where tp shards k
    backward   C = dY^T (X P) [n, r],  G = C P^T              E[G] = dY^T X, the gradient
    update     C = G P (P^T P)^-1,  N = Adam(C)
               W = W - lr (scale N P^T + weight_decay W)

One draw of G is far from the gradient, with k / r times its square: what is learned, and clipped, is the subspace's
part. P is a function of the block's name, of k and of the step div `update_gap`, on every rank: nothing of it is saved,
and layers with a common input share it. Moments outlive a subspace. The output layer of attention keeps its whole
input, which attention saves in any case; its gradient is projected at the update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megascale.core.seeds import seed_of
from megascale.ops.optimizer import Update, UpdateInput
from megascale.optim.adam import adam
from megascale.optim.contrib.counter_random import random_integers

BITS = 53  # of a uniform number in fp64
ROWS = 256  # of P that are drawn at a time, to bound temporary tensors


def projection(name: str, inputs: int, options: Mapping[str, Any], step: int, like: Tensor) -> Tensor:
    """Draw P [inputs, rank] of the block of a layer or weight of this name, in a step from 1 on, in the dtype and on
    the device of `like` (Box and Muller 1958).
    """
    block, rank = ".".join(name.split(".")[:2]), int(options["rank"])
    basis, key = like.new_empty(inputs, rank), (block, inputs, max(0, step - 1) // int(options["update_gap"]))
    for start in range(0, inputs, ROWS):
        rows = basis[start : start + ROWS]
        numbers = random_integers(seed_of("compact", *key, start), 2 * rows.numel(), like.device) >> (63 - BITS)
        radius, angle = (numbers.double().add_(1) / 2**BITS).view(2, *rows.shape)
        rows.copy_(radius.log_().mul_(-2 / rank).sqrt_().mul_(angle.mul_(2 * math.pi).cos_()))
    return basis


def compact(given: UpdateInput) -> Update:
    """Return the direction of a matrix [m, n], and the moments [m, r]."""
    grad, like = given.grad, given.grad.new_empty(0, dtype=given.dtype)
    basis = projection(given.name, grad.shape[1], given.options, given.step, like).to(grad.dtype)
    low = torch.linalg.solve(basis.mT @ basis, (grad @ basis).mT).mT
    direction, moments = adam(replace(given, grad=low))
    return given.options["scale"] * direction @ basis.mT, moments
