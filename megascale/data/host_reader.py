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
from megascale.data.reader_shape import reader_shape
from megascale.data.reader_supervisor import ReaderSupervisor


def open_host_samples(
    config: RunConfig, mesh: Mesh, orders: Mapping[SplitName, StepOrder]
) -> dict[SplitName, HostSamples]:
    """Open the samples of this host's reader by split; the first rank that reads starts it. A collective of the ranks
    of a host that read. Requires `comm.init.init_distributed`.

    Raises: DataError on all of them without memory or process for it
    """
    found = reader_shape(config, mesh.topology, ranks_of_host(mesh.rank), len(orders))
    readers = found.ranks
    control = ControlChannel("host", readers, readers.index(mesh.rank), mesh.recorder.log)
    close: Callable[[], None] = lambda: None  # noqa: E731
    opened: tuple[int, int, str] = (0, 0, "")
    if mesh.rank == readers[0]:
        try:
            memory = ReaderMemory.allocate(found.memory)
            supervisor = ReaderSupervisor(ReaderWork(config, found.memory, orders, found.replicas), memory)
            supervisor.start()
            opened, close = (os.getpid(), memory.descriptor, ""), supervisor.close
        except (OSError, DataError) as error:
            opened = (0, 0, _explain(error, found.memory))
    pid, descriptor, problem = control.broadcast(opened, "the host's reader")
    if problem:
        raise DataError(problem, hint='fewer data.prefetch, or data.reader = "rank"')
    if mesh.rank != readers[0]:
        memory = ReaderMemory(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR), found.memory)
    return {
        split: HostSamples(memory, number, order, found.rows, readers.index(mesh.rank), (readers[0], pid), close)
        for number, (split, order) in enumerate(orders.items())
    }


def _explain(error: OSError | DataError, shape: MemoryShape) -> str:
    if isinstance(error, DataError):
        return error.message
    reason = os_error_hint(error, str(error.strerror))
    return f"{shape.bytes} bytes of memory for the samples of this host cannot be had: {reason}"
