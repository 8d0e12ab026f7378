"""The random Hadamard transform (RHT) of NVFP4's wgrad: outliers of a token are spread over 16 tokens.

    x' = x D H / 4        H H^T = 16, D^2 = 1        (g D H / 4) (x D H / 4)^T = g x^T

H is Sylvester's matrix of 16 rows. The signs D are those of Transformer Engine, the same in all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIDE = 16
NEGATIVE = 0xD7E8  # bit i: the sign of the i-th of D is negative


def rotate(x: Tensor) -> Tensor:
    """Transform groups of 16 elements along the last dimension of x: bf16, from sums in fp32.

    Sums are of pairs, in the same order on every device and for every shape, which a GEMM's are not.
    """
    signs = 1 - 2 * (NEGATIVE >> torch.arange(SIDE, device=x.device) & 1)
    groups = (x.float().unflatten(-1, (-1, SIDE)) * signs).unflatten(-1, (2, 2, 2, 2))
    for axis in (-4, -3, -2, -1):  # halves have no names: they would keep the groups before the last ones
        groups = torch.stack([combine(*groups.unbind(axis)) for combine in (torch.add, torch.sub)], axis)
    return (groups / SIDE**0.5).flatten(-5).to(torch.bfloat16)
