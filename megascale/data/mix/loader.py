"""The batch loader of a data-parallel rank: the micro-batches of a step, as tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megascale.config.batch_rampup import BatchSizes
from megascale.data.host_reader.host_samples import HostSamples
from megascale.data.mix.batch_shape import BatchShape as BatchShape
from megascale.data.mix.hybrid_batches import HybridPool
from megascale.data.mix.mixture import Mixture, MockMixture, Sample
from megascale.data.mix.mixture_weights import MixtureWeights
from megascale.device import copy_to_device
from megascale.layout.document_shards import RowSharding
from megascale.layout.sequence_shard import SequenceShard
from megascale.ops.boundaries import Boundaries
from megascale.parallel.kv_store import KVStore
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
    stage needs them. `sharding`: of sequences that several ranks share; `chunks`: of sequences, each a micro-batch;
    `pool`: plans the micro-batches from the documents of all samples instead. `sizes`: of batches during a ramp-up.
    `fault_hook`: called before a batch is read.
    """

    def __init__(  # noqa: PLR0913
        self,
        samples: SampleSource | None,
        shape: BatchShape,
        rank: int,
        *,
        dropout: float,
        seed: int,
        device: torch.device,
        boundaries: BoundarySource | None = None,
        sharding: RowSharding | None = None,
        chunks: Sequence[SequenceShard] = (),
        pool: HybridPool | None = None,
        sizes: BatchSizes | None = None,
    ) -> None:
        self._samples = samples
        self._source = samples if samples is not None else boundaries
        self._ahead = self._source if isinstance(self._source, HostSamples) else None
        self._shape = shape
        self._rank = rank
        self._dropout = dropout
        self._seed = seed
        self._device = device
        self._boundaries = boundaries
        self._sharding = sharding
        self._chunks = chunks
        self._pool = pool
        self._sizes = sizes
        self._prefetched: tuple[int, StepBatch] | None = None
        self.fault_hook: Callable[[], None] | None = None

    def change_weights(self, weights: MixtureWeights) -> None:
        """Follow the weights that a data policy has found, for the steps from their last part on."""
        if isinstance(self._source, (Mixture, HostSamples)):
            self._source.change_weights(weights)

    def begin(self, consumed_samples: int, end: int = 0) -> None:
        """Let the host's reader, if there is one, work ahead from here on. `end`: samples of the run, if known."""
        if self._ahead is not None:
            self._ahead.begin(consumed_samples, end)
        elif isinstance(self._source, Mixture) and end:
            self._source.expected = end

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
        if self._pool is not None:
            return StepBatch(self._planned(range(consumed_samples, consumed_samples + shape.global_batch), self._pool))
        with self._ahead.step(consumed_samples) if self._ahead is not None else nullcontext():
            indices = range(shape.num_microbatches)
            return StepBatch([part for index in indices for part in self._micro_batches(consumed_samples, index)])

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

    def _planned(self, samples: range, pool: HybridPool) -> list[MicroBatch]:
        """The micro-batches of this rank of a pool."""
        assert isinstance(self._source, Mixture | MockMixture), "a rank of a pool reads samples itself"
        dropout = Dropout(0.0, self._seed, [samples.start], self._device)
        return pool.micro_batches(self._source, samples, self._device, dropout)

    def _micro_batches(self, consumed_samples: int, index: int) -> Iterator[MicroBatch]:
        """Read the samples of a micro-batch of whole sequences, and yield the parts of it that this rank trains on."""
        keys = KVStore() if self._chunks else None
        indices = [consumed_samples + row for row in self._shape.rows(index, self._rank)]
        dropout = Dropout(self._dropout, self._seed, indices, self._device)
        if self._samples is None:
            rows = [self._boundaries.positions(number) for number in indices] if self._boundaries else []
            found = Boundaries.from_positions(rows, self._device) if rows else None
            yield from (MicroBatch(None, None, None, dropout, found, shard, keys) for shard in self._shards(found))
            return
        samples = [self._samples[number] for number in indices]
        placed = [sample.positions for sample in samples if sample.positions is not None]
        boundaries = Boundaries.from_positions(placed, self._device) if placed else None
        masks = [np.ones_like(s.labels) if s.mask is None else s.mask for s in samples]
        masked = any(sample.mask is not None for sample in samples)
        total = sum(mask.sum().item() for mask in masks)  # on the host: sums on the device would synchronize
        for shard in self._shards(boundaries):
            own = slice(None) if shard is None else np.concatenate([np.arange(*span) for span in shard.spans])
            tokens, labels = (
                self._to_device([row[own] for row in rows])
                for rows in ([s.tokens for s in samples], [s.labels for s in samples])
            )
            counts = sum(mask[own].sum().item() for mask in masks), total
            mask = self._to_device([row[own] for row in masks]) if masked else None
            yield MicroBatch(tokens, labels, mask, dropout, boundaries, shard, keys, *counts)

    def _shards(self, boundaries: Boundaries | None) -> Sequence[SequenceShard | None]:
        """The parts of a sequence that are micro-batches of this rank: chunks, a shard, or all of it."""
        if self._chunks:
            return self._chunks
        starts = None if boundaries is None else boundaries.starts
        return [None if self._sharding is None else self._sharding.shard(starts)]

    def _to_device(self, rows: list[np.ndarray]) -> Tensor:
        """Stack rows [s] to [s, b] on the device."""
        return copy_to_device(np.stack(rows, 1), self._device)
