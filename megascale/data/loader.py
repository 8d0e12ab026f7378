"""The batch loader of a data-parallel rank: the micro-batches of a step, as tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megascale.config.batch_rampup import BatchSizes
from megascale.data.batch_shape import BatchShape as BatchShape
from megascale.data.host_samples import HostSamples
from megascale.data.mixture import Sample
from megascale.ops.boundaries import Boundaries
from megascale.parallel.microbatch import MicroBatch, StepBatch
from megascale.parallel.rng import Dropout


class SampleSource(Protocol):
    """Samples by index, as a loader reads them: a Mixture or a MockMixture in the rank, or HostSamples."""

    def __getitem__(self, index: int) -> Sample: ...


class BoundarySource(Protocol):
    """Document boundaries of samples by index, for stages that read no tokens."""

    def positions(self, index: int) -> np.ndarray:
        """The positions of a sample's tokens within their documents, with `data.mask = "document"`."""


class Loader:
    """Loads the batches of a split on data-parallel rank `rank`. Between the first and the last pipeline stage
    micro-batches carry no tokens: `samples` is None there. With a document mask `boundaries` is given instead: every
    stage needs them. `sizes`: of batches during a ramp-up. `fault_hook`: called before a batch is read.
    """

    def __init__(
        self,
        samples: SampleSource | None,
        shape: BatchShape,
        rank: int,
        *,
        dropout: float,
        seed: int,
        device: torch.device,
        boundaries: BoundarySource | None = None,
        sizes: BatchSizes | None = None,
    ) -> None:
        self._samples = samples
        source = samples if samples is not None else boundaries
        self._ahead = source if isinstance(source, HostSamples) else None
        self._shape = shape
        self._rank = rank
        self._dropout = dropout
        self._seed = seed
        self._device = device
        self._boundaries = boundaries
        self._sizes = sizes
        self._prefetched: tuple[int, StepBatch] | None = None
        self.fault_hook: Callable[[], None] | None = None

    def begin(self, consumed_samples: int) -> None:
        """Let the host's reader, if there is one, work ahead from here on."""
        if self._ahead is not None:
            self._ahead.begin(consumed_samples)

    def close(self) -> None:
        """End the host's reader, if this rank keeps it."""
        if self._ahead is not None:
            self._ahead.close()

    def batch(self, consumed_samples: int) -> StepBatch:
        """The batch of the step that follows `consumed_samples` samples of the run."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] == consumed_samples:
            return prefetched[1]
        if self.fault_hook is not None:
            self.fault_hook()
        shape = self._shape
        if self._sizes is not None:
            shape = replace(shape, global_batch=self._sizes.at(consumed_samples))
        with self._ahead.step(consumed_samples) if self._ahead is not None else nullcontext():
            parts = [self._micro_batch(consumed_samples, index) for index in range(shape.num_microbatches)]
        return StepBatch([micro_batch for micro_batch, _ in parts], sum(loss_tokens for _, loss_tokens in parts))

    def prefetch(self, consumed_samples: int) -> None:
        """Load the result of the next `batch(consumed_samples)` while the device is busy. After an error the step that
        trains on the batch reads again, and raises. A batch for which the host's reader must be waited for is left to
        that step, where the wait shows.
        """
        if self._ahead is not None and not self._ahead.is_ready(consumed_samples):
            return
        with suppress(Exception):
            self._prefetched = (consumed_samples, self.batch(consumed_samples))

    def batches(self, count: int) -> Iterator[StepBatch]:
        """The first `count` batches of the split."""
        return (self.batch(index * self._shape.global_batch) for index in range(count))

    def _micro_batch(self, consumed_samples: int, index: int) -> tuple[MicroBatch, int]:
        """A micro-batch, and the number of its labels that count in the loss."""
        indices = [consumed_samples + row for row in self._shape.rows(index, self._rank)]
        dropout = Dropout(self._dropout, self._seed, indices, self._device)
        if self._samples is None:
            rows = [self._boundaries.positions(number) for number in indices] if self._boundaries else []
            found = Boundaries.from_positions(rows, self._device) if rows else None
            return MicroBatch(None, None, None, dropout, found), 0
        samples = [self._samples[number] for number in indices]
        tokens, labels = self._to_device([s.tokens for s in samples]), self._to_device([s.labels for s in samples])
        placed = [sample.positions for sample in samples if sample.positions is not None]
        boundaries = Boundaries.from_positions(placed, self._device) if placed else None
        if all(sample.mask is None for sample in samples):
            return MicroBatch(tokens, labels, None, dropout, boundaries), labels.numel()
        masks = [np.ones_like(s.labels) if s.mask is None else s.mask for s in samples]
        loss_tokens = sum(int(mask.sum()) for mask in masks)  # on the host: a sum on the device would synchronize
        return MicroBatch(tokens, labels, self._to_device(masks), dropout, boundaries), loss_tokens

    def _to_device(self, rows: list[np.ndarray]) -> Tensor:
        """Stack rows [s] to [s, b] on the device."""
        stacked = torch.from_numpy(np.stack(rows, 1))
        if self._device.type == "cpu":
            return stacked
        return stacked.pin_memory().to(self._device, non_blocking=True)  # pageable memory would block the host
