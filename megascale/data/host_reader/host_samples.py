"""A rank's view of the samples read by the reader of its host (`open_host_samples`): the ranks with samples to read,
the memory shared by them, and the process that fills the memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from megascale.comm.control import ControlChannel
from megascale.comm.host_ranks import ranks_of_host
from megascale.core.errors import DataError, LostPeerError
from megascale.core.process import process_exists
from megascale.core.wait_notice import WaitNotice
from megascale.data.host_reader.reader_memory import END, ReaderMemory, reader_shape
from megascale.data.host_reader.reader_process import ReaderWork
from megascale.data.host_reader.reader_supervisor import WITHOUT_READER_HINT, ReaderSupervisor
from megascale.data.host_reader.sample_record import decode_sample
from megascale.data.mix.samples import Sample, SampleSource

if TYPE_CHECKING:
    from megascale.comm.mesh import Mesh
    from megascale.config.dataset_files import SplitName
    from megascale.data.mix.batch_shape import StepOrder
    from megascale.data.mix.data_policy import MixtureWeights
    from megascale.data.mix.mixture_spec import MixtureSpec

FIRST_POLL_S, LAST_POLL_S = 0.0002, 0.005  # seconds between two looks at the ring, at first and in a long wait
LIVENESS_CHECK_S = 1.0  # seconds between checks by a waiting rank that a reader will come


class HostSamples(SampleSource):
    """The samples of a split, step by step, in the ring of this host's reader.

    `split`: number of the ring. `rows`: of a step, those that this host's ranks read. `reader`: this rank's number
    among them. `first`: (global rank, process) of the rank that keeps the reader.
    """

    def __init__(
        self,
        memory: ReaderMemory,
        split: int,
        order: StepOrder,
        rows: list[int],
        reader: int,
        first: tuple[int, int],
        end_reader: Callable[[], None] = lambda: None,
    ) -> None:
        self._memory = memory
        self._ring = memory.ring(split)
        self._order = order
        self._places = {row: place for place, row in enumerate(rows)}
        self._reader = reader
        self._first = first
        self._generation = self._number = 0
        self._next: int | None = None
        self._consumed = 0
        self._end_reader = end_reader

    def change_weights(self, weights: MixtureWeights) -> None:
        if self._reader == 0:
            self._memory.write_weights(weights.to_numbers())

    def begin(self, consumed: int, end: int = 0) -> None:
        """Let the reader work ahead, from the step that follows `consumed` samples."""
        if end:
            self._order = replace(self._order, end=end)
            self._ring.set(END, end)  # before the request of the generation that is to know
        self._generation += 1
        self._number, self._next = 0, consumed
        self._ring.request(self._reader, self._generation, consumed)

    def is_ready(self, consumed: int) -> bool:
        return consumed == self._next and self._is_filled()

    @contextlib.contextmanager
    def step(self, consumed: int) -> Iterator[None]:
        """Wait for a step (`SampleSource.step`).

        Raises: DataError for a sample that cannot be read, and without a reader; LostPeerError if the rank that keeps
        the reader has ended
        """
        if consumed != self._next:
            self.begin(consumed)
        if not self._is_filled():
            self._wait()
        found, error = self._ring.step(self._number)
        assert found == consumed, f"the host's reader has the step after {found} samples, not {consumed}"
        if error:
            raise DataError(**json.loads(error))
        self._consumed = consumed
        yield
        self._number += 1
        self._ring.release(self._reader, self._generation, self._number)
        self._next = self._order.after(consumed)

    def __getitem__(self, index: int) -> Sample:
        """The sample `index` of the run, which is one of the present step's."""
        return decode_sample(self._ring.record(self._number, self._places[index - self._consumed]))

    def close(self) -> None:
        self._end_reader()

    def _is_filled(self) -> bool:
        generation, filled = self._ring.filled
        return generation == self._generation and filled > self._number

    def _wait(self) -> None:
        notice, checked, pause = WaitNotice(f"rank {self._first[0]}"), 0.0, FIRST_POLL_S
        while not self._is_filled():
            time.sleep(pause)
            pause = min(2 * pause, LAST_POLL_S)
            if notice.waited_s - checked < LIVENESS_CHECK_S:
                continue
            checked = notice.waited_s
            if failure := self._memory.failure:
                raise DataError(failure, hint=WITHOUT_READER_HINT)
            if not process_exists(self._first[1]):
                what = f"process {self._first[1]}, which keeps the reader of this host, has ended"
                raise LostPeerError(what, peers=(self._first[0],))
            if self._reader == 0:
                notice.print_if_due(lambda: f"the host's reader, which reads the step after {self._next} samples")


def open_host_samples(
    specs: Mapping[SplitName, MixtureSpec], mesh: Mesh, orders: Mapping[SplitName, StepOrder],
    token_ranks: Collection[int],
) -> dict[SplitName, HostSamples]:  # fmt: skip
    """Open the samples of this host's reader by split; the first rank that reads starts it. A collective of the ranks
    of a host that read. Requires `comm.init.init_distributed`. `token_ranks`: the pipeline ranks that need tokens.

    Raises: DataError on all of them without memory or process for it
    """
    ranks = ranks_of_host(mesh.rank)
    found = reader_shape(specs["train"], orders["train"].shape, mesh.topology, token_ranks, ranks, len(orders))
    readers = found.ranks
    control = ControlChannel("host", readers, readers.index(mesh.rank), mesh.recorder.log)
    close: Callable[[], None] = lambda: None  # noqa: E731
    opened: tuple[int, int, str] = (0, 0, "")
    if mesh.rank == readers[0]:
        try:
            memory = ReaderMemory.allocate(found.memory)
            supervisor = ReaderSupervisor(ReaderWork(specs, found.memory, orders, found.replicas), memory)
            supervisor.start()
            opened, close = (os.getpid(), memory.descriptor, ""), supervisor.close
        except DataError as error:
            opened = (0, 0, error.message)
    pid, descriptor, problem = control.broadcast(opened, "the host's reader")
    if problem:
        raise DataError(problem, hint='fewer data.prefetch, or data.reader = "rank"')
    if mesh.rank != readers[0]:
        memory = ReaderMemory(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR), found.memory)
    return {
        split: HostSamples(memory, number, order, found.rows, readers.index(mesh.rank), (readers[0], pid), close)
        for number, (split, order) in enumerate(orders.items())
    }
