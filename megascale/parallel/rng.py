"""Dropout that does not depend on the layout.

Each mask is drawn for one sample of the run, one layer and one place in it, from a generator seeded by these alone,
over the whole of its global shape; a rank takes its part. Any layout therefore drops the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def seed_of(*key: object) -> int:
    """A 63-bit seed from a key: equal keys give equal seeds in every process, different keys different ones."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Dropout:
    """Draws masks for the samples of one micro-batch. `samples`: their numbers in the run, one for each batch row."""

    def __init__(self, probability: float, seed: int, samples: Sequence[int], device: torch.device) -> None:
        self.probability = probability
        self._seed = seed
        self._samples = samples
        self._generator = torch.Generator(device)

    def hidden(self, x_sbh: Tensor, place: str, first_row: int, rows: int) -> Tensor:
        """x [s_local, b, h] with elements dropped and the others scaled; x holds positions `first_row` on of `rows`."""
        if not self.probability:
            return x_sbh
        h, here = x_sbh.shape[-1], slice(first_row, first_row + x_sbh.shape[0])
        keep = torch.stack([self._keep((rows, h), place, sample)[here] for sample in self._samples], 1)
        return x_sbh * keep / (1 - self.probability)

    def attention(self, place: str, heads: range, s: int) -> Tensor | None:
        """The attention weights to keep, bool [b, len(heads), s, s], for the heads with these global numbers."""
        if not self.probability:
            return None
        masks = [[self._keep((s, s), f"{place}/{head}", sample) for head in heads] for sample in self._samples]
        return torch.stack([torch.stack(row) for row in masks])

    def _keep(self, shape: tuple[int, int], place: str, sample: int) -> Tensor:
        self._generator.manual_seed(seed_of(self._seed, "dropout", place, sample))
        drawn = torch.rand(shape, generator=self._generator, device=self._generator.device)
        return drawn >= self.probability
