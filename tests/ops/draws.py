"""Matrices of the kinds by which formats differ: gaussian, with outlier columns, and with a heavy tail."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("gaussian", "outlier columns", "heavy tail")


def draw(kind: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Draw a matrix, f32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    if kind == "outlier columns":
        x[:, torch.randperm(columns, generator=generator)[: columns // 64]] *= 50
    elif kind == "heavy tail":
        x *= (0.5 * torch.randn(rows, columns, generator=generator)).exp() * 1.0
    return x
