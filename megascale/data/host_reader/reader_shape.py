"""The ranks of a host that read samples, and the memory of their reader: arithmetic alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megascale.config.run import RunConfig, dataset_prefixes
from megascale.data.host_reader.reader_memory import MemoryShape
from megascale.data.host_reader.sample_record import record_bytes
from megascale.data.mix.batch_shape import BatchShape
from megascale.data.mix.mixture_weights import numbers
from megascale.layout.topology import Topology

PROCESS_BYTES = 64 << 20
"""Memory of the reader's process without samples; 51 MB are measured after its imports, 21 of them of files."""


def reads_tokens(topology: Topology, rank: int) -> bool:
    """Return True if a rank needs tokens: in the first and in the last pipeline stage."""
    return topology.coord(rank).pp in (0, topology.pp - 1)


def reads_samples(config: RunConfig, topology: Topology, rank: int) -> bool:
    """Return True if a rank needs samples: their tokens, or with a document mask their positions."""
    return reads_tokens(topology, rank) or config.data.mask == "document"


@dataclass(frozen=True)
class ReaderShape:
    """The `ranks` of a host that read samples, their data-parallel `replicas`, and the `rows` of a step that they need;
    `memory`: of their reader.
    """

    ranks: list[int]
    replicas: list[int]
    rows: list[int]
    memory: MemoryShape

    @property
    def bytes(self) -> int:
        """Host memory of the reader: it shares some with the ranks, and has samples of a step and its own beside."""
        return self.memory.bytes + len(self.rows) * self.memory.record_bytes + PROCESS_BYTES


def reader_shape(config: RunConfig, topology: Topology, ranks: Sequence[int], splits: int) -> ReaderShape:
    """Describe the reader of a host with these `ranks` of a job, for training and perhaps evaluations (`splits`)."""
    readers = [rank for rank in ranks if reads_samples(config, topology, rank)]
    replicas = sorted({topology.coord(rank).dp for rank in readers})
    rows = BatchShape(config.batch.total, config.batch.micro, config.dp).rows_of(replicas)
    weights = numbers(len(dataset_prefixes(config.data.train))) if config.data.policy else 0
    size = record_bytes(config.model.seq_length)
    return ReaderShape(
        readers, replicas, rows, MemoryShape(splits, len(readers), config.data.prefetch, len(rows), size, weights)
    )
