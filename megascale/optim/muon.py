"""Muon: momentum of matrices, orthogonalized by Newton-Schulz steps.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon); "Muon is Scalable for LLM Training" (Liu et al. 2025,
arXiv:2502.16982) for weight decay and the learning rate, which then is AdamW's:

    B = momentum B + (1 - momentum) G
    O = NewtonSchulz(momentum B + (1 - momentum) G)        nesterov; else of B
    W = W - lr (0.2 sqrt(max(m, n)) O + weight_decay W)

A quintic Newton-Schulz step X <- a X + (b A + c A^2) X, A = X X^T, drives the singular values of X towards 1, to within
about 0.7 to 1.2. q, k and v, and gate and up, are matrices of their own; with `per_head` every head of them is.
`ns_dtype`: of the steps, by default the dtype of the weights; torch.optim.Muon always uses bf16. `adjust_lr`: with
"match_rms_adamw" AdamW's learning rate and weight decay fit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megascale.ops.optimizer import Update, UpdateInput

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The coefficients a, b, c of a step, by Jordan et al.: the steepest slope at zero."""

EPS = 1e-7  # the least norm by which a matrix is divided

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""Dtypes of Newton-Schulz steps; otherwise that of the weights."""


def muon(given: UpdateInput) -> Update:
    """Return the scaled orthogonalized momentum of a matrix [m, n], and the momentum."""
    o, grad = given.options, given.grad

    def momentum() -> Tensor:  # called twice: it takes no memory during the steps
        return given.state["momentum"].lerp(grad, 1 - o["momentum"])

    blend = momentum()
    if o["nesterov"]:
        torch.lerp(grad, blend, o["momentum"], out=blend)
    rows = given.head_dim if o["per_head"] and given.head_dim else grad.shape[0]
    stack = blend.view(-1, rows, grad.shape[1]).to(DTYPES.get(o["ns_dtype"], given.dtype))
    del blend
    orthogonal = newton_schulz(stack, o["ns_steps"]).to(grad.dtype).view_as(grad)
    del stack
    return orthogonal.mul_(rms_factor(rows, grad.shape[1], o["adjust_lr"])), {"momentum": momentum()}


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Replace the singular values of matrices x [k, m, n] by values about 1."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)  # singular values of at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def rms_factor(rows: int, columns: int, adjust_lr: str) -> float:
    """Return the factor of an orthogonal matrix; "match_rms_adamw" gives its elements AdamW's root mean square, 0.2."""
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if adjust_lr == "original" else 1.0
