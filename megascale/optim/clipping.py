"""The norm of a step's gradient, and the clipping that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.parallel.bucket import Bucket

ROW = 1 << 14  # elements whose squares are summed in the tensor's own dtype


@dataclass(frozen=True)
class Clipping:
    """Device scalars of a step: `norm`, f64, of the mean gradient before clipping; `grad_factor`, f64, to scale all
    gradients by; `skip`, f32, 1 to skip the update (then `grad_factor` is 1).
    """

    norm: Tensor
    grad_factor: Tensor
    skip: Tensor


def counted_elements(bucket: Bucket, *, tp: int) -> int:
    """Count the elements at the beginning of a bucket's shard that this rank contributes to sums over the job. `tp`:
    its index among the tp ranks.

    Replicas count once: the dp replicas with zero = 0, a tied embedding, and parameters replicated over tp.
    """
    if bucket.tied_group.index or bucket.replicas.index:
        return 0
    start, stop = bucket.shard
    if tp:
        stop = min(stop, bucket.layout.replicated[0])  # tp rank 0 counts the replicated parameters
    return max(0, stop - start)


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum the squares of x [n]: an f64 scalar.

    Summed by rows, because a CPU sums in fp32: over many millions of fp32 elements the error would reach 0.1%.
    """
    full_rows = x.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(x[:full_rows].view(-1, ROW), dim=1)
    return rows.double().square().sum() + torch.linalg.vector_norm(x[full_rows:]).double().square()


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum the squares of n tensors, [n], f64. GPUs sum in small blocks, many tensors per kernel."""
    if tensors[0].is_cpu:
        return torch.stack([sum_of_squares(tensor) for tensor in tensors])
    return torch.stack(torch._foreach_norm(list(tensors))).double().square_()
