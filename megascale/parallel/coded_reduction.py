"""A reduce-scatter of gradients whose addends travel as FP8 codes, with one scale (FP8-LM, Peng et al. 2023,
arXiv:2310.18313).

    scale = 2^ceil(log2(amax / 448))          amax: the largest magnitude of all elements and ranks
    out = scale * sum of e4m3(x / scale)      over the ranks, in their order and in fp32

A rank sends a byte for each element of the other ranks' rows, which gloo has no FP8 for and takes as u8. A rank's
rounding is at most 2^-4 of an element, or scale / 1024 where that is more: elements below amax / 458,752 become zero.
An element that is not finite on a rank is NaN in the sum, and others stay what they are or saturate.
FP8-LM also divides by the root of the number of ranks, for room where its ranks add codes in FP8: here nothing is added
in FP8, and no range is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce, all_to_all_v
from megascale.comm.group import Group
from megascale.comm.work import Work
from megascale.ops.fp8 import scales_of
from megascale.ops.quantized import ElementFormat

CODE = ElementFormat.E4M3
PART = 1 << 22  # elements that are encoded at a time, to bound temporary tensors


def amax_of(x: Tensor) -> Tensor:
    """Return max |x|, f32 [], in one read of x. NaN and infinity propagate."""
    return torch.stack(x.aminmax()).abs().amax().float()


def shared_scale(amax: Tensor) -> Tensor:
    """Return the least power of two, f32 [], at which `amax` does not overflow; 1 for an infinite one."""
    return torch.where(amax.isfinite(), scales_of(amax, CODE, "pow2"), 1.0)


def reduce_scatter_codes(group: Group, out: Tensor, full: Tensor, amax: Tensor, *, label: str) -> Work:
    """Start to sum `full` [size x n] over the ranks into this rank's rows `out` [n], which may be a view of its rows
    of `full`. `amax`: f32 [], of this rank's `full`, which is not read after the return. A collective.
    """
    largest = torch.where(amax.isfinite(), amax, torch.inf)  # of NaN a maximum is undefined
    all_reduce(group, largest, "max", label=f"{label} amax")
    scale = shared_scale(largest)
    codes = _encode(full, scale.reciprocal()).view(group.size, -1)
    received = torch.empty_like(codes)
    sent = all_to_all_v(group, received.unbind(), codes.unbind(), label=label, wait=False)
    return _CodedSum(sent, codes, received, scale, out)


def _encode(x: Tensor, factor: Tensor) -> Tensor:
    """Return the codes of x * factor [n] as bytes."""
    codes = torch.empty_like(x, dtype=torch.uint8)
    for into, part in zip(codes.split(PART), x.split(PART), strict=True):
        scaled = (part * factor).nan_to_num_(torch.nan, torch.nan, torch.nan)
        into.view(CODE.dtype).copy_(scaled.clamp_(-CODE.max_value, CODE.max_value))
    return codes


@dataclass
class _CodedSum(Work):
    """Codes on their way: after `wait`, `out` is their sum. `codes`, kept until they have left, and `received`: u8
    [ranks, n].
    """

    sent: Work
    codes: Tensor
    received: Tensor
    scale: Tensor
    out: Tensor

    def wait(self) -> None:
        self.sent.wait()
        total = torch.zeros_like(self.out, dtype=torch.float32)
        for codes in self.received.view(CODE.dtype):
            total += codes.float()
        torch.mul(total, self.scale, out=self.out)
