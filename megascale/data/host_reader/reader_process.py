"""The reader of a host: a process that reads and assembles the samples of all ranks there, ahead of the step. No torch.

    python -m megascale.data.host_reader.reader_process DESCRIPTOR PARENT

DESCRIPTOR is the memory that it shares with the ranks; its work comes as a line of JSON on the standard input, with
whose end it ends. It may be killed and started again at any moment: what is done stands in the memory.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from megascale.config.dataset_files import SplitName
from megascale.core.errors import DataError
from megascale.core.process import die_with_parent, ignore_stops
from megascale.data.host_reader.reader_memory import END, ERROR_BYTES, MemoryShape, ReaderMemory, Ring
from megascale.data.host_reader.sample_record import encode_sample
from megascale.data.mix.batch_shape import StepOrder
from megascale.data.mix.data_policy import MixtureWeights
from megascale.data.mix.mixture_spec import MixtureSpec
from megascale.data.mix.mock_mixture import build_mixture

IDLE_S = 0.002  # seconds between two looks at the ranks while there is nothing to read
FETCHED = 64  # samples whose blocks are fetched from remote storage together


@dataclass(frozen=True)
class ReaderWork:
    """The work of a reader: the splits by name in the order of their rings, for data-parallel `ranks` of the job."""

    specs: Mapping[SplitName, MixtureSpec]
    memory: MemoryShape
    splits: Mapping[SplitName, StepOrder]
    ranks: Sequence[int]

    def to_json(self) -> bytes:
        return TypeAdapter(ReaderWork).dump_json(self, by_alias=True)

    @classmethod
    def from_json(cls, text: bytes) -> ReaderWork:
        return TypeAdapter(ReaderWork).validate_json(text)


class SplitReader:
    """Fills the ring of a split."""

    def __init__(self, work: ReaderWork, split: SplitName, memory: ReaderMemory) -> None:
        self._memory = memory
        self._weights = 0  # how often they were written when this reader read them
        self._depth = work.memory.depth
        self._ring: Ring = memory.ring(list(work.splits).index(split))
        self._order = work.splits[split]
        self._ranks = work.ranks
        self._samples = build_mixture(work.specs[split], 0 if self._order.again else self._order.end)
        self._follow_end()

    def run(self) -> None:
        while True:
            self._ring.beat()
            if not self.fill_next():
                time.sleep(IDLE_S)

    def fill_next(self) -> bool:
        """Fill the next step; return False if the ring is full, or no further step is wanted."""
        requests, (generation, filled) = self._ring.requests(), self._ring.filled
        wanted = min(request.generation for request in requests)
        if wanted > generation:
            self._follow_end()
            self._ring.begin(wanted)
            generation, filled = wanted, 0
        present = [request for request in requests if request.generation == generation]
        if not generation or not present:
            return False
        if filled - min(request.released for request in present) >= self._depth:
            return False
        position = self._order.after(self._ring.step(filled - 1)[0]) if filled else present[0].position
        if position is None:
            return False
        # weights are read after the requests: a rank writes them before it releases the step before them
        if not self._order.again and (written := self._memory.weights_written) != self._weights:
            self._weights = written
            self._samples.change_weights(MixtureWeights.from_numbers(self._memory.weights()))
        self._ring.fill(filled, position, *self._records(position))
        return True

    def _follow_end(self) -> None:
        if end := self._ring.get(END):
            self._order = replace(self._order, end=end)
            self._samples.begin(0, end)

    def _records(self, position: int) -> tuple[list[bytes], bytes]:
        """The records of the samples of the step at `position`; none, and an error, if one cannot be read."""
        indices = [position + row for row in self._order.shape_at(position).rows_of(self._ranks)]
        try:
            return [record for first in range(0, len(indices), FETCHED) for record in
                    self._read(indices[first : first + FETCHED])], b""  # fmt: skip
        except DataError as error:
            return [], encode_error(error.message, error.hint)
        except MemoryError:
            raise
        except Exception as error:  # a bug: another reader would fail too
            traceback.print_exception(error)
            what = f"the reader of this host has failed: {type(error).__name__}: {error}"
            return [], encode_error(what, "its traceback is above, in the output of the host")

    def _read(self, indices: Sequence[int]) -> Iterator[bytes]:
        """Yield the records of samples. Before each the memory tells which one is read, in case that storage hangs.

        What they are read from is opened first: an index may be built, or waited for, longer than any read takes.
        """
        samples = self._samples
        with self._ring.opening():
            for index in indices:
                self._ring.beat(f"sample {index}, of {samples.source_of(index)}")
                samples.open(index)
        self._ring.beat(f"sample {indices[0]}, of {samples.source_of(indices[0])}")
        samples.fetch(indices, self._ring.beat)
        for index in indices:
            self._ring.beat(f"sample {index}, of {samples.source_of(index)}")
            yield encode_sample(samples[index])


def encode_error(message: str, hint: str) -> bytes:
    """Return the JSON form of an error in at most ERROR_BYTES: the end of a long message is left out."""
    hint = hint[: ERROR_BYTES // 16]
    while len(text := json.dumps({"message": message, "hint": hint}, ensure_ascii=False).encode()) > ERROR_BYTES:
        message = message[: len(message) * 3 // 4 - 3] + "..."
    return text


def main(descriptor: int, parent: int) -> None:
    """Read ahead until the parent process ends, or the standard input does."""
    die_with_parent(parent)
    ignore_stops()  # ranks finish their step, and need its samples
    work = ReaderWork.from_json(sys.stdin.buffer.readline())
    memory = ReaderMemory(descriptor, work.memory)

    def end(arguments: threading.ExceptHookArgs) -> None:
        sys.excepthook(arguments.exc_type, arguments.exc_value or SystemExit(), arguments.exc_traceback)
        sys.stderr.flush()
        os._exit(1)

    threading.excepthook = end
    for split in work.splits:
        threading.Thread(target=SplitReader(work, split, memory).run, name=f"read {split}", daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
