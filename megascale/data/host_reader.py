"""Opening the reader of a host: which ranks read there, the memory that they share, and the process that fills it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from megascale.comm.control import ControlChannel
from megascale.comm.host_ranks import ranks_of_host
from megascale.comm.mesh import Mesh
from megascale.config.dataset_files import SplitName
from megascale.config.run import RunConfig
from megascale.core.errors import DataError
from megascale.core.limits import os_error_hint
from megascale.data.batch_shape import StepOrder
from megascale.data.host_samples import HostSamples
from megascale.data.reader_memory import MemoryShape, ReaderMemory
from megascale.data.reader_process import ReaderWork
from megascale.data.reader_supervisor import ReaderSupervisor
from megascale.data.sample_record import record_bytes
from megascale.layout.topology import Topology


def reads_tokens(topology: Topology, rank: int) -> bool:
    """Return True if a rank needs tokens: in the first and in the last pipeline stage."""
    return topology.coord(rank).pp in (0, topology.pp - 1)


def reads_samples(config: RunConfig, topology: Topology, rank: int) -> bool:
    """Return True if a rank needs samples: their tokens, or with a document mask their positions."""
    return reads_tokens(topology, rank) or config.data.mask == "document"


def open_host_samples(
    config: RunConfig, mesh: Mesh, orders: Mapping[SplitName, StepOrder]
) -> dict[SplitName, HostSamples]:
    """Open the samples of this host's reader by split; the first rank that reads starts it. A collective of the ranks
    of a host that read. Requires `comm.init.init_distributed`.

    Raises: DataError on all of them without memory or process for it
    """
    readers = [rank for rank in ranks_of_host(mesh.rank) if reads_samples(config, mesh.topology, rank)]
    replicas = sorted({mesh.topology.coord(rank).dp for rank in readers})
    shape = next(iter(orders.values())).shape
    rows = shape.rows_of(replicas)
    memory_shape = MemoryShape(
        len(orders), len(readers), config.data.prefetch, len(rows), record_bytes(config.model.seq_length)
    )
    control = ControlChannel("host", readers, readers.index(mesh.rank), mesh.recorder.flight)
    close: Callable[[], None] = lambda: None  # noqa: E731
    opened: tuple[int, int, str] = (0, 0, "")
    if mesh.rank == readers[0]:
        try:
            memory = ReaderMemory.allocate(memory_shape)
            supervisor = ReaderSupervisor(ReaderWork(config, memory_shape, orders, replicas), memory)
            supervisor.start()
            opened, close = (os.getpid(), memory.descriptor, ""), supervisor.close
        except (OSError, DataError) as error:
            opened = (0, 0, _explain(error, memory_shape))
    pid, descriptor, problem = control.broadcast(opened, "the host's reader")
    if problem:
        raise DataError(problem, hint='fewer data.prefetch, or data.reader = "rank"')
    if mesh.rank != readers[0]:
        memory = ReaderMemory(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR), memory_shape)
    return {
        split: HostSamples(memory, number, order, rows, readers.index(mesh.rank), (readers[0], pid), close)
        for number, (split, order) in enumerate(orders.items())
    }


def _explain(error: OSError | DataError, shape: MemoryShape) -> str:
    if isinstance(error, DataError):
        return error.message
    reason = os_error_hint(error, str(error.strerror))
    return f"{shape.bytes} bytes of memory for the samples of this host cannot be had: {reason}"
