"""The batch loader of a data-parallel rank: the micro-batches of a step, as tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megascale.core.errors import DataError
from megascale.data.mix.batch_shape import BatchShape as BatchShape
from megascale.data.mix.samples import DocumentStarts, Sample, SampleSource, depth_labels
from megascale.device import copy_to_device
from megascale.ops.boundaries import Boundaries
from megascale.ops.distillation import SoftLabels
from megascale.parallel.microbatch import DepthTargets, MicroBatch, ObjectiveTargets, StepBatch
from megascale.parallel.rng import Dropout

if TYPE_CHECKING:
    from megascale.config.batch_rampup import BatchSizes
    from megascale.data.mix.data_policy import MixtureWeights
    from megascale.data.mix.hybrid_batches import HybridPool
    from megascale.data.mix.teacher import SoftLabelSource
    from megascale.layout.document_shards import RowSharding
    from megascale.layout.sequence_shard import SequenceShard
    from megascale.parallel.auxiliary_objectives import Objective


@dataclass
class Loader:
    """Loads the batches of a split on data-parallel rank `rank`. On pipeline ranks that need none
    micro-batches carry no tokens (`reads_tokens`): with a document mask they have the boundaries of documents, else
    `samples` is None. `sharding`: of sequences that several ranks share; `chunks`: of sequences, each a micro-batch;
    `pool`: plans the micro-batches from the documents of all samples instead. `sizes`: of batches during a ramp-up.
    `depths`: of multi-token prediction, for which micro-batches have targets, and `objectives` terms. `teacher`: reads
    its soft labels, of which `distill_alpha` is the share in the loss. `fault_hook`: called before a batch is read.
    """

    samples: SampleSource | None
    shape: BatchShape
    rank: int
    _: KW_ONLY
    dropout: float
    seed: int
    device: torch.device
    reads_tokens: bool = True
    sharding: RowSharding | None = None
    chunks: Sequence[SequenceShard] = ()
    pool: HybridPool | None = None
    sizes: BatchSizes | None = None
    depths: int = 0
    teacher: SoftLabelSource | None = None
    distill_alpha: float = 0.0
    objectives: Mapping[str, Objective] = field(default_factory=dict)
    fault_hook: Callable[[], None] | None = None
    _prefetched: tuple[int, StepBatch] | None = field(default=None, init=False)

    def change_weights(self, weights: MixtureWeights) -> None:
        """Follow the weights that a data policy has found, for the steps from their last part on."""
        if self.samples is not None:
            self.samples.change_weights(weights)

    def begin(self, consumed_samples: int, end: int = 0) -> None:
        """Let the samples be read ahead from here on, where they are. `end`: samples of the run, if known."""
        if self.samples is not None:
            self.samples.begin(consumed_samples, end)

    def close(self) -> None:
        """End what reads ahead, if this rank keeps it."""
        if self.samples is not None:
            self.samples.close()

    def batch(self, consumed_samples: int) -> StepBatch:
        """The batch of the step that follows `consumed_samples` samples of the run."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] == consumed_samples:
            return prefetched[1]
        if self.fault_hook is not None:
            self.fault_hook()
        shape = self.shape
        if self.sizes is not None:
            shape = replace(shape, global_batch=self.sizes.at(consumed_samples))
        if self.samples is None:
            return self._read(consumed_samples, shape)
        with self.samples.step(consumed_samples):
            return self._read(consumed_samples, shape)

    def prefetch(self, consumed_samples: int) -> None:
        """Load the result of the next `batch(consumed_samples)` while the device is busy. After an error of the data
        the step that trains on the batch reads again, and raises; other errors, such as the device's, are of this step.
        A batch for which the host's reader must be waited for is left to the next step, where the wait shows.
        """
        if self.samples is not None and not self.samples.is_ready(consumed_samples):
            return
        with suppress(DataError, OSError):
            self._prefetched = (consumed_samples, self.batch(consumed_samples))

    def batches(self, count: int) -> Iterator[StepBatch]:
        return (self.batch(index * self.shape.global_batch) for index in range(count))

    def _read(self, consumed_samples: int, shape: BatchShape) -> StepBatch:
        if self.pool is not None:
            assert self.samples is not None, "a rank of a pool reads the documents of all samples"
            samples = range(consumed_samples, consumed_samples + shape.global_batch)
            dropout = Dropout(0.0, self.seed, [samples.start], self.device)
            return StepBatch(self.pool.micro_batches(self.samples, samples, self.device, dropout))
        indices = range(shape.num_microbatches)
        return StepBatch([part for index in indices for part in self._micro_batches(consumed_samples, index)])

    def _micro_batches(self, consumed_samples: int, index: int) -> Iterator[MicroBatch]:
        """Read the samples of a micro-batch of whole sequences, and yield the parts of it that this rank trains on."""
        keys = None
        if self.chunks:
            from megascale.parallel.kv_store import KVStore

            keys = KVStore()
        indices = [consumed_samples + row for row in self.shape.rows(index, self.rank)]
        dropout = Dropout(self.dropout, self.seed, indices, self.device)
        if self.samples is None or not self.reads_tokens:
            found = (
                None if self.samples is None else boundaries_of([*map(self.samples.documents, indices)], self.device)
            )
            yield from (MicroBatch(None, None, None, dropout, found, shard, keys) for shard in self._shards(found))
            return
        samples = [self.samples[number] for number in indices]
        documents = [sample.documents for sample in samples if sample.documents is not None]
        boundaries = boundaries_of(documents, self.device) if documents else None
        masks = [np.ones_like(s.labels) if s.mask is None else s.mask for s in samples]
        masked = any(sample.mask is not None for sample in samples)
        total = sum(mask.sum().item() for mask in masks)  # on the host: sums on the device would synchronize
        read = zip(indices, samples, strict=True)
        soft = [rows for index, sample in read if self.teacher and (rows := self.teacher(index, sample.ids))]
        for shard in self._shards(boundaries):
            own = slice(None) if shard is None else np.concatenate([np.arange(*span) for span in shard.spans])
            tokens = self._to_device([sample.tokens for sample in samples], own)
            labels = self._to_device([sample.labels for sample in samples], own)
            counts = sum(mask[own].sum().item() for mask in masks), total
            mask = self._to_device(masks, own) if masked else None
            depths = tuple(self._depth_targets(samples, depth, own) for depth in range(1, self.depths + 1))
            taught = [self._to_device(rows, own) for rows in zip(*soft, strict=True)]
            teacher = SoftLabels(taught[0], taught[1], self.distill_alpha) if taught else None
            terms = {name: self._terms(each, samples, own) for name, each in self.objectives.items()}
            yield MicroBatch(
                tokens, labels, mask, dropout, boundaries, shard, keys, *counts, depths=depths, teacher=teacher,
                objectives=terms,
            )  # fmt: skip

    def _terms(self, objective: Objective, samples: list[Sample], own: slice | np.ndarray) -> ObjectiveTargets:
        """Return the terms of an objective in samples, which the rank with their first tokens counts."""
        chosen = [objective.choose(sample.tokens, spans_of(sample)).astype(np.int64) for sample in samples]
        rows = np.repeat(np.arange(len(chosen)), [*map(len, chosen)])
        places = np.full(len(samples[0].tokens), -1)
        places[own] = np.arange(len(places[own]))
        found = copy_to_device(np.column_stack((rows, places[np.concatenate(chosen)])), self.device)
        return ObjectiveTargets(objective.loss, found[:, 0], found[:, 1:], len(rows) if places[0] == 0 else 0)

    def _depth_targets(self, samples: list[Sample], depth: int, own: slice | np.ndarray) -> DepthTargets:
        """Return the targets of a depth of multi-token prediction, from 1."""
        labels, weights = zip(*(depth_labels(sample, depth) for sample in samples), strict=True)
        count = sum(row[own].sum().item() for row in weights)
        return DepthTargets(self._to_device(labels, own), self._to_device(weights, own), count)

    def _shards(self, boundaries: Boundaries | None) -> Sequence[SequenceShard | None]:
        """The parts of a sequence that are micro-batches of this rank: chunks, a shard, or all of it."""
        if self.chunks:
            return self.chunks
        starts = None if boundaries is None else boundaries.starts
        return [None if self.sharding is None else self.sharding.shard(starts)]

    def _to_device(self, rows: Iterable[np.ndarray], own: slice | np.ndarray) -> Tensor:
        """Stack the `own` positions of rows [s, ...] to [own, b, ...] on the device."""
        return copy_to_device(np.stack([row[own] for row in rows], 1), self.device)


def spans_of(sample: Sample) -> list[tuple[int, int]]:
    """Return the [start, stop) of a sample's documents, without padding; one without a document mask."""
    if (documents := sample.documents) is None:
        return [(0, len(sample.tokens))]
    return list(pairwise(documents.places + [documents.length] * (not documents.is_padded)))


def boundaries_of(rows: Sequence[DocumentStarts], device: torch.device) -> Boundaries:
    """Return the boundaries of the documents in the rows of a micro-batch."""
    padded = tuple(row.is_padded for row in rows)
    starts = tuple(tuple(row.places) for row in rows)
    return Boundaries(starts, rows[0].length, device, padded if any(padded) else ())
