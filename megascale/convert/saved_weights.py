"""The weights of a checkpoint, or the average of the weights that it keeps (`train.average`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.checkpoint import offline
from megascale.checkpoint.format import manifest
from megascale.core.errors import CheckpointError
from megascale.core.storage import Location
from megascale.parallel.stateful import AVERAGE, AVERAGE_UPDATES, WEIGHTS


@dataclass(frozen=True)
class SavedWeights:
    """Tensors of a checkpoint in `source` that are weights: the means of those with the `prefixes`."""

    source: Location
    saved: manifest.Manifest
    prefixes: tuple[str, ...] = (WEIGHTS,)

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the stored dtype of a weight; None without one."""
        stored = self.saved.tensors.get(self.prefixes[0] + name)
        return None if stored is None else getattr(torch, stored.dtype)

    def read(self, name: str) -> Tensor:
        """Read a weight.

        Raises: DamagedError if it is missing or damaged
        """
        found = []
        for prefix in self.prefixes:
            if prefix + name not in self.saved.tensors:
                raise manifest.DamagedError(f"{self.source} has no tensor {prefix}{name}")
            found.append(offline.read_tensor(self.source, self.saved, prefix + name))
        return torch.stack(found).mean(0) if len(found) > 1 else found[0]


def average_of_weights(source: Location, saved: manifest.Manifest) -> SavedWeights:
    """Return the average: of `lawa` the mean of the snapshots so far.

    Raises: CheckpointError without one
    """
    kept = {name.partition(".")[0] for name in saved.tensors if name.startswith(AVERAGE)} - {AVERAGE_UPDATES}
    taken = int(offline.read_tensor(source, saved, AVERAGE_UPDATES)) if AVERAGE_UPDATES in saved.tensors else 0
    if not taken:
        hint = "train.average = ema or lawa keeps one, every train.average_every steps"
        raise CheckpointError(f"{source} has no average of the weights", hint=hint)
    return SavedWeights(source, saved, tuple(f"{AVERAGE}{index}." for index in range(min(taken, len(kept)))))
