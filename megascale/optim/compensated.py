"""Master weights as pairs of bf16 numbers (Collage, Yu et al. 2024, arXiv:2405.03637).

    master weight = weight + residual

`weight` is the model's own, `residual` what rounding to it left over. A pair has 16 bits of significand in 4 bytes,
weights included, where a separate fp32 master takes 6. A step adds in fp32, and splits the sum again.

`KeptUpdates` measures what that loses, by the effective descent quality of the paper over its best value:

    kept = <wanted, effective> / <wanted, wanted>        1 if rounding loses nothing, 0 if no weight moves
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.comm.mesh import Mesh
from megascale.comm.totals import sum_over_job


def whole(weight: Tensor, residual: Tensor | None) -> Tensor:
    """Return the master weight: fp32 of a pair; without `residual`, the weight itself."""
    return weight if residual is None else weight.float() + residual.float()


def split(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split an fp32 value into the nearest number of a dtype and the nearest to the rest."""
    high = value.to(dtype)
    return high, (value - high.float()).to(dtype)


class KeptUpdates:
    """The share of a step's updates that rounding keeps, over the model. `on`: it is measured."""

    def __init__(self) -> None:
        self.on = False
        self._sums: list[Tensor] = []

    def add(self, wanted: Tensor, effective: Tensor, skip: Tensor) -> None:
        """Add the changes of elements [n], unless `skip` is 1. Replicas of an element count once."""
        sums = torch.stack([torch.dot(wanted, effective), torch.dot(wanted, wanted)])
        self._sums.append(torch.where(skip > 0, torch.zeros_like(sums), sums).double())

    def take(self, mesh: Mesh, device: torch.device) -> float | None:
        """Return the share of what was added since the last call, None if no weight was to move. A collective of all
        ranks, for which the host waits.
        """
        sums = torch.stack([torch.zeros(2, dtype=torch.float64, device=device), *self._sums]).sum(0)
        self._sums.clear()
        sum_over_job(mesh, sums, label="kept updates")
        kept, whole = sums.tolist()
        return kept / whole if whole else None
