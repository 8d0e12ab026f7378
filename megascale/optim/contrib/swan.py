"""SWAN: normalized and whitened gradients, without state (Ma et al. 2024, arXiv:2412.13148).

    X = (G - mean of a row) / standard deviation of the row
    X = (X X^T)^(-1/2) X, by `ns_steps` coupled Newton-Schulz steps; of X^T if X is tall
    W = W - lr (scale sqrt(max(m, n)) X + weight_decay W)

The inverse root of A = X X^T / |X X^T| is the limit of Z for Y = A, Z = I, and T = (3 I - Z Y) / 2, Y = Y T, Z = T Z.
The size of updates is Muon's: `scale`, 0.2, is AdamW's root mean square; the authors tune a factor of their own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megascale.ops.optimizer import Update, UpdateInput

EPS = 1e-30  # the least standard deviation or norm that divides


def swan(given: UpdateInput) -> Update:
    """Return the whitened gradient of a matrix [m, n]."""
    grad = given.grad
    centered = grad - grad.mean(1, keepdim=True)
    normalized = centered / centered.square().mean(1, keepdim=True).sqrt().clamp(min=EPS)
    return given.options["scale"] * math.sqrt(max(grad.shape)) * whiten(normalized, given.options["ns_steps"]), {}


def whiten(x: Tensor, steps: int) -> Tensor:
    """Return (x x^T)^(-1/2) x, for a tall matrix x (x^T x)^(-1/2): U V^T of the singular value decomposition."""
    short = x.mT if x.shape[0] > x.shape[1] else x
    gram = short @ short.mT
    norm = gram.norm().clamp(min=EPS)
    identity = torch.eye(len(gram), dtype=x.dtype, device=x.device)
    y, z = gram / norm, identity
    for _ in range(steps):
        t = 1.5 * identity - 0.5 * z @ y
        y, z = y @ t, t @ z
    white = z @ short / norm.sqrt()
    return white.mT if x.shape[0] > x.shape[1] else white
