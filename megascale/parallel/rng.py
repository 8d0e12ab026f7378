"""Dropout that does not depend on the layout.

A mask is drawn in its global shape, from a generator seeded by the run's seed, the sample, the layer and the place in
the layer; a rank slices its shard. Every layout therefore drops the same elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.core.seeds import seed_of


class Dropout:
    """Dropout for one micro-batch. `samples`: the global sample index of every batch row."""

    def __init__(self, probability: float, seed: int, samples: Sequence[int], device: torch.device) -> None:
        self.probability = probability
        self._seed = seed
        self.samples = samples
        self._generator = torch.Generator(device)

    def of_rows(self, rows: slice) -> Dropout:
        """The dropout of some rows of the micro-batch."""
        return Dropout(self.probability, self._seed, self.samples[rows], self._generator.device)

    def hidden_dropout(self, x_sbh: Tensor, place: str, first_row: int, rows: int) -> Tensor:
        """Apply dropout to x [s_local, b, h], which holds positions `first_row` onward of a sequence of `rows`."""
        if not self.probability:
            return x_sbh
        h, positions = x_sbh.shape[-1], slice(first_row, first_row + x_sbh.shape[0])
        keep = torch.stack([self._keep_mask((rows, h), place, sample)[positions] for sample in self.samples], 1)
        return x_sbh * keep / (1 - self.probability)

    def attention_keep_mask(self, place: str, heads: range, s: int) -> Tensor | None:
        """Draw the keep mask of attention weights, bool [b, len(heads), s, s], for global head indices `heads`."""
        if not self.probability:
            return None
        masks = [[self._keep_mask((s, s), f"{place}/{head}", sample) for head in heads] for sample in self.samples]
        return torch.stack([torch.stack(row) for row in masks])

    def _keep_mask(self, shape: tuple[int, int], place: str, sample: int) -> Tensor:
        self._generator.manual_seed(seed_of(self._seed, "dropout", place, sample))
        drawn = torch.rand(shape, generator=self._generator, device=self._generator.device, dtype=torch.float32)
        return drawn >= self.probability
