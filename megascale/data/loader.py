"""The batch of a step on one rank.

A step trains on the samples that follow those already seen. They go to micro-batches and data-parallel ranks by
arithmetic alone, so every rank knows which samples any other has, and no layout changes what a step trains on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megascale.data.mixture import Sample
from megascale.parallel.microbatch import MicroBatch, StepBatch
from megascale.parallel.rng import Dropout


class Samples(Protocol):
    """What a loader draws from."""

    samples: int

    def __getitem__(self, index: int) -> Sample: ...

    def prepare(self, start: int, stop: int) -> None: ...


@dataclass(frozen=True)
class Shape:
    """How the rows of a step are dealt out: `total` rows over `ranks` data-parallel ranks in micro-batches of
    `micro`.
    """

    total: int
    micro: int
    ranks: int

    @property
    def micro_batches(self) -> int:
        return self.total // (self.micro * self.ranks)

    def rows(self, micro_batch: int, rank: int) -> range:
        """The rows of one micro-batch of one rank."""
        first = (micro_batch * self.ranks + rank) * self.micro
        return range(first, first + self.micro)


class Loader:
    """Makes the batches of one split on data-parallel rank `rank`. `samples` is None on ranks that have neither the
    first nor the last stage: their micro-batches carry no tokens.
    """

    def __init__(
        self, samples: Samples | None, shape: Shape, rank: int, *, dropout: float, seed: int, device: torch.device
    ) -> None:
        self._samples = samples
        self._shape = shape
        self._rank = rank
        self._dropout = dropout
        self._seed = seed
        self._device = device
        self._ahead: tuple[int, StepBatch] | None = None

    def batch(self, seen: int) -> StepBatch:
        """The samples of the step that begins when `seen` samples of the run have been trained on."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == seen:
            return ahead[1]
        self.prepare(seen)
        made = [self._micro_batch(seen, index) for index in range(self._shape.micro_batches)]
        return StepBatch([micro_batch for micro_batch, _ in made], sum(counted for _, counted in made))

    def read_ahead(self, seen: int) -> None:
        """Make what the next `batch(seen)` returns, while the host would wait for the device. What cannot be read is
        tried again, and raises, in the step that trains on it.
        """
        with suppress(Exception):
            self._ahead = (seen, self.batch(seen))

    def prepare(self, seen: int) -> None:
        """Have rank 0 write the indices of the step after `seen` samples, and of the two that follow it. A rank that
        reads ahead knows the sums of the step before its own, which rank 0 began with indices for two more.
        """
        if self._samples is not None:
            self._samples.prepare(seen, seen + 3 * self._shape.total)

    def batches(self, count: int) -> Iterator[StepBatch]:
        """The first `count` batches."""
        return (self.batch(index * self._shape.total) for index in range(count))

    def _micro_batch(self, seen: int, index: int) -> tuple[MicroBatch, int]:
        """And how many of its labels count."""
        numbers = [seen + row for row in self._shape.rows(index, self._rank)]
        dropout = Dropout(self._dropout, self._seed, numbers, self._device)
        if self._samples is None:
            return MicroBatch(None, None, None, dropout), 0
        samples = [self._samples[number] for number in numbers]
        tokens, labels = self._rows([s.tokens for s in samples]), self._rows([s.labels for s in samples])
        if all(sample.mask is None for sample in samples):
            return MicroBatch(tokens, labels, None, dropout), labels.numel()
        masks = [torch.ones_like(s.labels) if s.mask is None else s.mask for s in samples]
        counted = sum(int(mask.sum()) for mask in masks)  # before they are on a device, for which the host would wait
        return MicroBatch(tokens, labels, self._rows(masks), dropout), counted

    def _rows(self, rows: list[Tensor]) -> Tensor:
        """Rows [s] side by side: [s, b], on the device."""
        together = torch.stack(rows, 1)
        if self._device.type == "cpu":
            return together
        return together.pin_memory().to(self._device, non_blocking=True)  # else the host would wait for the device
