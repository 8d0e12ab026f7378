"""A rank's view of the samples that the reader of its host has read. No torch."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from megascale.core.errors import DataError, LostPeerError
from megascale.core.process import process_exists
from megascale.core.wait_notice import WaitNotice
from megascale.data.host_reader.reader_memory import ReaderMemory
from megascale.data.host_reader.reader_supervisor import WITHOUT_READER_HINT
from megascale.data.host_reader.sample_record import decode_sample
from megascale.data.mix.batch_shape import StepOrder
from megascale.data.mix.mixture import Sample
from megascale.data.mix.mixture_weights import MixtureWeights

FIRST_POLL_S, LAST_POLL_S = 0.0002, 0.005
"""Seconds between two looks at the ring, at first and in a long wait."""

LIVENESS_CHECK_S = 1.0
"""Seconds between checks by a waiting rank that a reader will come."""


class HostSamples:
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
        close: Callable[[], None] = lambda: None,
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
        self.close = close

    @property
    def bytes_read(self) -> int:
        """Bytes of tokens that the host's readers have read from the datasets, for all its ranks."""
        return self._memory.bytes_read

    def change_weights(self, weights: MixtureWeights) -> None:
        """Let the reader follow the weights that a data policy has found; the first rank tells it."""
        if self._reader == 0:
            self._memory.write_weights(weights.to_numbers())

    def begin(self, consumed: int, end: int = 0) -> None:
        """Let the reader work ahead, from the step that follows `consumed` samples. `end`: samples of the run, if they
        are others than those of its configuration: a resumed run may have had other batches.
        """
        if end:
            self._order = replace(self._order, end=end)
            self._ring.set_end(end)
        self._generation += 1
        self._number, self._next = 0, consumed
        self._ring.request(self._reader, self._generation, consumed)

    def is_ready(self, consumed: int) -> bool:
        """Return True if `step(consumed)` need not wait."""
        return consumed == self._next and self._is_filled()

    @contextlib.contextmanager
    def step(self, consumed: int) -> Iterator[None]:
        """Wait for the step that follows `consumed` samples; in the block its samples can be read.

        Raises: DataError for a sample that cannot be read, and without a reader; LostPeerError if the rank that keeps
        the reader has ended
        """
        if consumed != self._next:
            self.begin(consumed)
        if not self._is_filled():
            self._wait()
        found = self._ring.position(self._number)
        assert found == consumed, f"the host's reader has the step after {found} samples, not {consumed}"
        if error := self._ring.error(self._number):
            raise DataError(**json.loads(error))
        self._consumed = consumed
        yield
        self._number += 1
        self._ring.release(self._reader, self._generation, self._number)
        self._next = self._order.after(consumed)

    def __getitem__(self, index: int) -> Sample:
        """The sample `index` of the run, which is one of the present step's."""
        return decode_sample(self._ring.record(self._number, self._places[index - self._consumed]))

    def positions(self, index: int) -> np.ndarray:
        """The positions of a sample's tokens within their documents, with `data.mask = "document"`."""
        positions = self[index].positions
        assert positions is not None
        return positions

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
