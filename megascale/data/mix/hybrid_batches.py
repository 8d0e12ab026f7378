"""The micro-batches of a step by hybrid data parallelism: documents of all samples, dealt to the ranks of the pool.

Every rank reads the boundaries of all samples of a step, plans (`layout.hybrid.planner`), which takes no communication,
and reads the tokens of its own documents. Packs are rows of whole documents; a ring's micro-batch is a rank's tokens of
one document. Rows may end in padding, a document that no other one sees and whose labels do not count: a compiler then
meets few numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from megascale.data.mix.samples import SampleSource
from megascale.device import copy_to_device
from megascale.layout.hybrid.plan import PlannedBatch, ring_parts, with_padding
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
    of the pipelines, of which each is a rank of the pool; `reads_tokens`: this stage does; `step`: of numbers of rows,
    as in `layout.hybrid.plan.with_padding`.
    """

    rank: int
    ranks: int
    max_tokens: int
    work: SequenceWork
    stages: int = 1
    reads_tokens: bool = True
    step: int = 1

    def micro_batches(
        self, source: SampleSource, samples: range, device: torch.device, dropout: Dropout
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches of a step: one at least, if need be without a label that counts."""
        documents = list(documents_of(source, samples))
        lengths = [document.stop - document.start for document in documents]
        plan = plan_hybrid(lengths, self.ranks, self.max_tokens, self.work, self.stages)
        pad = partial(with_padding, step=self.step, max_tokens=self.max_tokens)
        rows = _Rows(source, device, dropout, self.reads_tokens, pad)
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
    """Reads micro-batches of one row [n, 1]. `pad`: from the tokens of a micro-batch and its ranks to the tokens with
    padding.
    """

    source: SampleSource
    device: torch.device
    dropout: Dropout
    reads_tokens: bool
    pad: Callable[[int, int], int]

    def read(self, batch: PlannedBatch, documents: Sequence[SamplePart], rank: int) -> MicroBatch:
        """Read a pack of documents, or this rank's tokens of a document in a ring."""
        lengths = [document.stop - document.start for document in documents]
        *starts, end = accumulate(lengths, initial=0)
        total = self.pad(end, batch.ranks)
        padded = (True,) if total > end else ()
        boundaries = Boundaries(((*starts, end) if padded else tuple(starts),), total, self.device, padded)
        if batch.ranks == 1:
            whole = [(document, [TokenSpan(0, length)]) for document, length in zip(documents, lengths, strict=True)]
            return self._read(whole, boundaries, None, total)
        spans = tuple(join(part for part in own if part.size) for own in ring_parts(total, batch.ranks))
        shard = SequenceShard(total, spans, rank - batch.first, batch.first)
        own = [span.cut(0, end) for span in shard.spans if span.start < end]  # the padding is a rank's last tokens
        return self._read([(documents[0], own)], boundaries, shard, shard.size)

    def read_nothing(self, document: SamplePart) -> MicroBatch:
        """Read a token whose label does not count, for a rank without documents."""
        total = self.pad(1, 1)
        boundaries = Boundaries(((0,),), total, self.device, padded=(True,))
        batch = self._read([(document, [TokenSpan(0, 1)])], boundaries, None, total)
        mask = None if batch.tokens is None else torch.zeros_like(batch.tokens)
        return replace(batch, mask=mask, loss_tokens=0)

    def _read(
        self,
        pieces: Sequence[tuple[SamplePart, Sequence[TokenSpan]]],
        boundaries: Boundaries,
        shard: SequenceShard | None,
        rows: int,
    ) -> MicroBatch:
        """Read pieces of documents, and fill up the row with the first token of the first document."""
        if not self.reads_tokens:
            return MicroBatch(None, None, None, self.dropout, boundaries, shard, planned_rows=rows)
        (first, _), *_ = pieces
        read = {document.sample: self.source[document.sample] for document, _ in pieces}
        places = [
            (read[document.sample], slice(document.start + start, document.start + stop))
            for document, parts in pieces
            for start, stop in parts
        ]
        filler = np.repeat(read[first.sample].tokens[first.start], rows - sum(at.stop - at.start for _, at in places))
        tokens, labels = (
            copy_to_device(np.concatenate([*parts, filler])[:, None], self.device)
            for parts in ([sample.tokens[at] for sample, at in places], [sample.labels[at] for sample, at in places])
        )
        masks = [np.ones(at.stop - at.start) if sample.mask is None else sample.mask[at] for sample, at in places]
        mask = np.concatenate([*masks, np.zeros(len(filler))])
        counted = mask.sum().item()  # on the host: a sum on the device would synchronize
        on_device = copy_to_device(mask[:, None], self.device)
        return MicroBatch(
            tokens, labels, on_device, self.dropout, boundaries, shard, loss_tokens=counted, planned_rows=rows
        )
