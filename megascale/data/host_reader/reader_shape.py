"""The ranks of a host that read samples, and the memory of their reader: arithmetic alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megascale.config.run import dataset_prefixes
from megascale.config.train import DataConfig
from megascale.data.host_reader.reader_memory import MemoryShape
from megascale.data.host_reader.sample_record import record_bytes
from megascale.data.mix.batch_shape import BatchShape, reads_samples
from megascale.data.mix.data_policy import numbers
from megascale.layout.topology import Topology

PROCESS_BYTES = 64 << 20
"""Memory of the reader's process without samples; 51 MB are measured after its imports, 21 of them of files."""


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


def reader_shape(
    data: DataConfig, shape: BatchShape, seq_length: int, topology: Topology, ranks: Sequence[int], splits: int
) -> ReaderShape:
    """Describe the reader of a host with these `ranks` of a job, for training and perhaps evaluations (`splits`), in
    steps of `shape`.
    """
    readers = [rank for rank in ranks if reads_samples(data.mask, topology, rank)]
    replicas = sorted({topology.coord(rank).dp for rank in readers})
    rows = shape.rows_of(replicas)
    weights = numbers(len(dataset_prefixes(data.train))) if data.policy else 0
    memory = MemoryShape(splits, len(readers), data.prefetch, len(rows), record_bytes(seq_length), weights)
    return ReaderShape(readers, replicas, rows, memory)
