"""The totals of a step or of an evaluation: named sums over all ranks, in one all-reduce of a few fp64 values.

totals = StepTotals(mesh, device, batch)
totals.add_per_microbatch(loss=loss, tokens=batch.loss_tokens)
totals.add(stops=1.0)
sums = totals.reduce()           # {"loss": ..., "tokens": ..., "stops": ...}, scalars on the device
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.comm.mesh import Mesh
from megascale.comm.totals import sum_over_job
from megascale.parallel.microbatch import StepBatch
from megascale.plan.account.step_totals import vector_name

Total = float | Tensor
"""This rank's part of a total: a number, or a scalar or vector on the run's device."""


class StepTotals:
    """This rank's parts of the totals of `batch`. All ranks add the same names in the same order."""

    def __init__(self, mesh: Mesh, device: torch.device, batch: StepBatch = StepBatch(())) -> None:
        self.batch = batch
        self._mesh = mesh
        self._device = device
        self._parts: dict[str, Total] = {}

    def add(self, **parts: Total) -> None:
        """Add totals to which every rank has a part. Raises: ValueError for a name that is taken"""
        if taken := parts.keys() & self._parts.keys():
            raise ValueError(f"there is a total named {min(taken)!r} already")
        self._parts |= parts

    def add_per_microbatch(self, **parts: Total) -> None:
        """Add totals over this rank's tokens of micro-batches, which count once: on tp rank 0 of the last stage."""
        if not self._mesh.has_last_stage or self._mesh.coord.tp:
            parts = {n: torch.zeros_like(part) if isinstance(part, Tensor) else 0.0 for n, part in parts.items()}
        self.add(**parts)

    def add_per_sequence(self, **parts: Total) -> None:
        """Add totals over micro-batches of whole sequences, which the ranks that share them count once."""
        self.add_per_microbatch(**(parts if self._mesh.coord.cp == 0 else dict.fromkeys(parts, 0.0)))

    def reduce(self, label: str = "totals") -> dict[str, Tensor]:
        """All-reduce the totals over the job, under `label` in the event log. The sums have the same bits on all ranks;
        the host does not wait. Those of a vector are named "NAME 0", "NAME 1", ...
        """
        names = [name for total, part in self._parts.items() for name in _names(total, part)]
        values = torch.zeros(len(names), dtype=torch.float64, device=self._device)
        sizes = [part.numel() if isinstance(part, Tensor) else 1 for part in self._parts.values()]
        for place, part in zip(values.split(sizes), self._parts.values(), strict=True):
            if isinstance(part, Tensor):
                place.copy_(part.view(-1))
            else:
                place.fill_(part)  # `values[index] = part` would copy from the host and wait for the device
        sum_over_job(self._mesh, values, label=label)
        return dict(zip(names, values, strict=True))


def _names(total: str, part: Total) -> list[str]:
    return (
        [vector_name(total, index) for index in range(len(part))]
        if isinstance(part, Tensor) and part.dim()
        else [total]
    )
