"""Numbers that change in training, are equal on all ranks and are saved: a part of a run with state (`Stateful`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megascale.comm.mesh import Mesh
from megascale.comm.totals import sum_over_job
from megascale.core.errors import CheckpointError
from megascale.parallel.stateful import GlobalTensor


class ReplicatedState:
    """Named vectors of numbers, f64. `sizes`: of each. All are zero at first, and where a checkpoint has none."""

    def __init__(self, sizes: Mapping[str, int], mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        self._vectors = {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in sizes.items()}

    def store(self, name: str, values: Sequence[float]) -> None:
        """Keep the values of a vector; the host does not wait for the device."""
        vector, found = self._vectors[name], torch.tensor(values, dtype=torch.float64)
        vector.copy_(found if vector.device.type == "cpu" else found.pin_memory(), non_blocking=True)

    def vector(self, name: str) -> Tensor:
        """The vector itself, for a reader or writer on the device."""
        return self._vectors[name]

    def values(self, name: str) -> list[float]:
        """The values of a vector. The host waits for the device."""
        found: list[float] = self._vectors[name].tolist()
        return found

    def global_tensors(self) -> dict[str, GlobalTensor]:
        return {name: GlobalTensor.whole(vector) for name, vector in self._vectors.items() if vector.numel()}

    def flat_tensors(self) -> list[Tensor]:
        return [vector for vector in self._vectors.values() if vector.numel()]

    def begin_load(self, saved: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> dict[str, GlobalTensor]:
        """Have the first rank read what the checkpoint has.

        Raises: CheckpointError, on every rank, for a vector of another size
        """
        for name, vector in self._vectors.items():
            vector.zero_()
            if name in saved and list(saved[name]) != [vector.numel()]:
                what = f"{name} has {saved[name][0]} numbers in the checkpoint, and {vector.numel()} in this run"
                raise CheckpointError(what, hint="the datasets and plug-ins that the run has had")
        if self._mesh.rank:
            return {}
        return {name: tensor for name, tensor in self.global_tensors().items() if name in saved}

    def end_load(self) -> None:
        for vector in self.flat_tensors():
            sum_over_job(self._mesh, vector)  # zero but on the first rank
        self.end_restore()

    def end_restore(self) -> None:
        """Take note that the vectors have been loaded."""
