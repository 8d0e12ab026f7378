"""The micro-batches of a step by hybrid data parallelism: documents of all samples, dealt to the ranks of the pool.

Every rank reads the boundaries of all samples of a step, plans (`layout.hybrid.planner`), which takes no communication,
and reads the tokens of its own documents. Packs are rows of whole documents; a ring's micro-batch is a rank's tokens of
one document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from megascale.data.mix.samples import SampleSource
from megascale.device import copy_to_device
from megascale.layout.hybrid.plan import PlannedBatch, ring_parts
from megascale.layout.hybrid.planner import plan_hybrid
from megascale.layout.hybrid.sequence_work import SequenceWork
from megascale.layout.sequence_shard import SequenceShard, TokenSpan, join
from megascale.ops.boundaries import Boundaries
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.rng import Dropout


class SamplePart(NamedTuple):
    """Tokens [start, stop) of a sample: a document."""

    sample: int
    start: int
    stop: int


@dataclass(frozen=True)
class HybridPool:
    """A rank of the pool. `max_tokens`: of a rank in a micro-batch; `work`: costs of a document by length; `stages`:
    of the pipelines, of which each is a rank of the pool; `reads_tokens`: this stage does.
    """

    rank: int
    ranks: int
    max_tokens: int
    work: SequenceWork
    stages: int = 1
    reads_tokens: bool = True

    def micro_batches(
        self, source: SampleSource, samples: range, device: torch.device, dropout: Dropout
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches of a step: one at least, if need be without a label that counts."""
        documents = list(documents_of(source, samples))
        lengths = [document.stop - document.start for document in documents]
        plan = plan_hybrid(lengths, self.ranks, self.max_tokens, self.work, self.stages)
        rows = _Rows(source, device, dropout, self.reads_tokens)
        planned = [(batch, [documents[i] for i in batch.sequences]) for batch in plan.microbatches[self.rank]]
        return [rows.read(batch, held, self.rank) for batch, held in planned] or [rows.read_nothing(documents[0])]


def documents_of(source: SampleSource, samples: range) -> Iterator[SamplePart]:
    """Yield the documents of samples, without padding."""
    for sample in samples:
        found = source.documents(sample)
        ends = found.places if found.is_padded else [*found.places, found.length]
        for start, stop in pairwise(ends):
            yield SamplePart(sample, start, stop)


@dataclass(frozen=True)
class _Rows:
    """Reads micro-batches of one row [n, 1]."""

    source: SampleSource
    device: torch.device
    dropout: Dropout
    reads_tokens: bool

    def read(self, batch: PlannedBatch, documents: Sequence[SamplePart], rank: int) -> MicroBatch:
        """Read a pack of documents, or this rank's tokens of a document in a ring."""
        lengths = [document.stop - document.start for document in documents]
        if batch.ranks == 1:
            starts = tuple(accumulate(lengths[:-1], initial=0))
            whole = [(document, [TokenSpan(0, length)]) for document, length in zip(documents, lengths, strict=True)]
            return self._read(whole, Boundaries((starts,), sum(lengths), self.device), None)
        parts, (length,) = ring_parts(lengths[0], batch.ranks), lengths
        spans = tuple(join(part for part in own if part.size) for own in parts)
        shard = SequenceShard(length, spans, rank - batch.first, batch.first)
        return self._read([(documents[0], shard.spans)], Boundaries(((0,),), length, self.device), shard)

    def read_nothing(self, document: SamplePart) -> MicroBatch:
        """Read a token whose label does not count, for a rank without documents."""
        batch = self._read([(document, [TokenSpan(0, 1)])], Boundaries(((0,),), 1, self.device, padded=(True,)), None)
        mask = None if batch.tokens is None else torch.zeros_like(batch.tokens)
        return replace(batch, mask=mask, loss_tokens=0)

    def _read(
        self,
        pieces: Sequence[tuple[SamplePart, Sequence[TokenSpan]]],
        boundaries: Boundaries,
        shard: SequenceShard | None,
    ) -> MicroBatch:
        count = sum(stop - start for _, parts in pieces for start, stop in parts)
        if not self.reads_tokens:
            return MicroBatch(None, None, None, self.dropout, boundaries, shard, planned_rows=count)
        read = {document.sample: self.source[document.sample] for document, _ in pieces}
        places = [
            (read[document.sample], slice(document.start + start, document.start + stop))
            for document, parts in pieces
            for start, stop in parts
        ]
        tokens, labels = (
            copy_to_device(np.concatenate(rows)[:, None], self.device)
            for rows in ([sample.tokens[at] for sample, at in places], [sample.labels[at] for sample, at in places])
        )
        masks = [np.ones(at.stop - at.start) if sample.mask is None else sample.mask[at] for sample, at in places]
        mask = np.concatenate(masks)
        counted = mask.sum().item()  # on the host: a sum on the device would synchronize
        on_device = copy_to_device(mask[:, None], self.device)
        return MicroBatch(
            tokens, labels, on_device, self.dropout, boundaries, shard, loss_tokens=counted, planned_rows=count
        )
