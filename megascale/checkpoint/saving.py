"""Saving in two stages (MegaScale 4): a rank copies its state and trains on; another process writes the copy.

What a rank knows of its writer travels with the sums of a step, so that all ranks know in the same step that nobody
writes any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from megascale.checkpoint import manifest, store
from megascale.checkpoint.background import Background
from megascale.checkpoint.memory import SLOTS, Memory
from megascale.checkpoint.plan import SavePlanner, described
from megascale.checkpoint.shard import chunk_of
from megascale.checkpoint.snapshot import Snapshot
from megascale.checkpoint.state import FORMATS, GlobalTensor, cut
from megascale.checkpoint.storage import WRITABLE, Location
from megascale.checkpoint.together import by_all, by_first
from megascale.comm.mesh import Mesh
from megascale.core.errors import CheckpointError
from megascale.device import Device

ENTRY_BYTES = 192
"""Of a box in a file's header beside its name, at most; what else is in the header fits into what one box leaves."""

HEADER_BYTES = 4 << 10
"""Of the header of a file of one box, at most."""

SILENCE_S = 60.0
"""Seconds after which a rank that waits for its writer says so, again and again."""

BOX_BYTES = 64 << 20
"""Of a stored box, at most, unless a row is larger: what a reader holds beside its state."""


@dataclass(frozen=True)
class Saved:
    """What became of an attempt: `error` if it failed, and then nothing of it is left. `path`: None for a copy that
    stays in memory. Seconds: `waited`, for the attempt before; `stalled`, that training then stood still; `written`,
    from then until it was complete.
    """

    path: Location | None
    step: int
    waited: float
    stalled: float
    written: float
    error: CheckpointError | None


@dataclass
class _Attempt:
    path: Location | None
    slot: int
    facts: manifest.Facts
    waited: float
    stalled: float
    since: float
    written: Mapping[str, Any] | None = None
    error: CheckpointError | None = None


@dataclass(frozen=True)
class _Plan:
    """What this rank writes, and on the first rank what all write together."""

    items: Sequence[WriteItem]
    chunk: int
    files: dict[str, list[list[Any]]]
    metadata: Metadata | None


class Saving:
    """Writes checkpoints of `state`, of which `held` are the flat tensors that its pieces are parts of. With `memory`
    copies stay there as well. Every rank calls the same methods in the same steps, but for `poll`.
    """

    def __init__(
        self,
        state: Mapping[str, GlobalTensor],
        held: Sequence[Tensor],
        file_bytes: int,
        memory: Memory | None,
        mesh: Mesh,
        device: Device,
    ) -> None:
        self._mesh = mesh
        self._state = cut(state, min(BOX_BYTES, file_bytes - HEADER_BYTES))
        self._file_bytes = file_bytes
        self._memory = memory
        if memory is None:
            self._slots = [Snapshot(held, device)]
            self._background = Background([self._slots[0].descriptor])
        else:
            self._slots = self._lasting(held, memory, device)
            self._background = Background([memory.listener, *(s.descriptor for s in self._slots)], memory.receive)
        self._maker = ThreadPoolExecutor(1, "maker")
        self._what = self._description()
        self._plan: _Plan | None = None
        self._attempt: _Attempt | None = None

    def _lasting(self, held: Sequence[Tensor], memory: Memory, device: Device) -> list[Snapshot]:
        """The slots of `memory`.

        Raises: CheckpointError on every rank if some rank has no room; no host then keeps what was taken in vain
        """

        def take() -> list[Snapshot]:
            return [Snapshot(held, device, memory.file(slot)) for slot in range(len(SLOTS))]

        try:
            return by_all(self._mesh.world, take, "room for copies")
        except CheckpointError:
            memory.clear()
            raise

    @property
    def writer(self) -> int:
        """The number of the process that writes."""
        return self._background.pid

    @property
    def busy(self) -> bool:
        """Whether an attempt is under way."""
        return self._attempt is not None

    def begin(self, folder: Location | None, facts: manifest.Facts, waited: float = 0.0) -> None:
        """Copy the state, while the first rank makes a new folder in this one, and have it written there while training
        goes on; with None it stays in memory alone. `waited`: seconds for the attempt before.

        Raises: CheckpointError on every rank if the folder cannot be made
        """
        start = time.monotonic()
        assert self._attempt is None, "one is under way"
        making = None
        if folder is not None and self._mesh.rank == 0:
            making = self._maker.submit(_make, folder, facts.progress.step)
        slot = self._memory.turn() if self._memory else 0
        self._slots[slot].take()
        path = self._made(folder, making) if folder is not None else None
        if path is not None:
            self._plan = self._plan or self._planned()
        self._attempt = attempt = _Attempt(path, slot, facts, waited, 0.0, time.monotonic())
        self._background.order(**self._order(attempt))
        attempt.stalled = time.monotonic() - start

    def _made(self, folder: Location, making: Future[Location] | None) -> Location:
        """The folder in this one that the first rank makes.

        Raises: CheckpointError on every rank if it cannot be made
        """

        def name() -> str:
            assert making is not None, "the first rank makes it"
            try:
                return making.result().name
            except OSError as error:
                what = f"rank 0: cannot make {error.filename}: {error.strerror or error}"
                raise CheckpointError(what, mend=WRITABLE) from None

        return folder / by_first(self._mesh.world, name, "the folder of a checkpoint")

    def _order(self, attempt: _Attempt) -> dict[str, dict[str, Any]]:
        """What the writer is to do with a copy."""
        memory, copy = self._memory, self._slots[attempt.slot].path
        order: dict[str, dict[str, Any]] = {}
        if memory:
            header = str(memory.header(attempt.slot))
            order["keep"] = {"memory": copy, "path": header, "header": memory.said(self._what, attempt.facts)}
        if attempt.path is not None and self._plan is not None:
            to = {"folder": attempt.path.url, "patience": attempt.path.patience}
            order["write"] = {"memory": copy, "chunk": self._plan.chunk, "files": self._plan.files} | to
        elif memory and memory.neighbour is not None:
            order["send"] = memory.sending(memory.file(attempt.slot), memory.neighbour)
        return order

    def recall(self, since: int) -> tuple[manifest.Facts | None, list[str]]:
        """Take up the newest copies in memory, of a step that is not before `since` (`Memory.recall`)."""
        if self._memory is None:
            return None, []
        return self._memory.recall(self._slots, self._what, self._background, since)

    def poll(self, *, wait: bool = False) -> tuple[float, float]:
        """Whether this rank has written its part of the attempt, and whether it has failed to: 1 or 0 each."""
        attempt = self._attempt
        if attempt is None:
            return 0.0, 0.0
        if attempt.written is None and attempt.error is None:
            try:
                while (found := self._background.answer(SILENCE_S if wait else 0.0)) is None and wait:
                    self._say(attempt)
                attempt.written = found
            except CheckpointError as error:
                attempt.error = error
        return float(attempt.written is not None), float(attempt.error is not None)

    def _say(self, attempt: _Attempt) -> None:
        """Who is waited for. What does not answer, such as a lost mount, stops its writer in the kernel for good."""
        print(
            f"WARNING: rank {self._mesh.rank} waits for its writer, process {self.writer}, which has been writing "
            f"{attempt.path or 'a copy'} for {time.monotonic() - attempt.since:.0f} s: does the storage answer?",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    def settle(self, written: float, failed: float) -> Saved | None:
        """What became of the attempt, once the sums of `poll` over all ranks say that nobody writes any more: it is
        complete, or gone. None before, and without one.
        """
        attempt = self._attempt
        if attempt is None or written + failed < self._mesh.world.size:
            return None
        self._attempt = None
        error = self._failure(attempt) if failed else self._complete(attempt)
        if error is None and self._memory:
            self._memory.settled(attempt.slot)
        passed = time.monotonic() - attempt.since
        step = attempt.facts.progress.step
        return Saved(attempt.path, step, attempt.waited, attempt.stalled, passed, error)

    def finish(self) -> Saved | None:
        """Wait for the attempt under way; None without one."""
        if self._attempt is None:
            return None
        failed = sum(self._mesh.world.control.gather(self.poll(wait=True)[1], "the end of a checkpoint"))
        return self.settle(self._mesh.world.size - failed, failed)

    def _description(self) -> str:
        """Stands for what lies where in a copy."""
        where = {
            name: [[*piece.offset, *piece.size, self._slots[0].place(piece.data)] for piece in tensor.pieces]
            for name, tensor in self._state.items()
        }
        return hashlib.sha256(json.dumps([self._slots[0].size, where]).encode()).hexdigest()

    def _planned(self) -> _Plan:
        """Which pieces this rank writes: the same at every save, for the layout is."""
        planner = SavePlanner()
        planner.set_up_planner(self._state, is_coordinator=self._mesh.rank == 0)
        control, own = self._mesh.world.control, planner.create_local_plan()
        ranks = control.collect(described(self._state), "the plan of checkpoints")
        metadata, shares = None, None
        if ranks is not None:
            kept, metadata = planner.share_out(ranks)
            shares = [(numbers, chunk_of(store.size_of(metadata))) for numbers in kept]
        numbers, chunk = control.scatter(shares, "the plan of checkpoints")
        items = [own.items[number] for number in numbers]
        return _Plan(items, chunk, self._files([(item, planner.resolve_data(item)) for item in items]), metadata)

    def _files(self, boxes: Sequence[tuple[WriteItem, Tensor]]) -> dict[str, list[list[Any]]]:
        """What the writer is to know of each file, none of which is larger than `file_bytes` unless one box is."""
        files: dict[str, list[list[Any]]] = {}
        left = 0
        for item, data in boxes:
            key, place = store.key_of(item.index), self._slots[0].place(data)
            size = data.nbytes + len(key) + ENTRY_BYTES
            if not files or size > left:
                name = f"rank-{self._mesh.rank:05d}-{len(files):03d}.safetensors"
                entries, left = files.setdefault(name, []), self._file_bytes
            entries.append([key, FORMATS[data.dtype], list(data.shape), place, data.nbytes])
            left -= size
        return files

    def _complete(self, attempt: _Attempt) -> CheckpointError | None:
        """Gather what was written, and on the first rank write the manifest. Returns what failed there."""
        if attempt.path is None:
            return None
        assert self._plan is not None and attempt.written is not None
        ours = self._places(self._plan, attempt.written), attempt.written["files"]
        ranks = self._mesh.world.control.collect(ours, "what was written")
        try:
            by_first(self._mesh.world, lambda: self._write_manifest(attempt, ranks or []), "the manifest")
        except CheckpointError as error:
            return error
        return None

    def _write_manifest(self, attempt: _Attempt, ranks: Sequence[Any]) -> None:
        """`ranks`: of each the places of its boxes, and its files.

        Raises: CheckpointError if it cannot be written; nothing of the attempt is left
        """
        assert attempt.path is not None and self._plan is not None and self._plan.metadata is not None
        places = {box: place for boxes, _ in ranks for box, place in boxes.items()}
        files = {name: manifest.File(**file) for _, files in ranks for name, file in files.items()}
        try:
            made = store.manifest_of(attempt.facts, self._plan.metadata, places, files, self._plan.chunk)
            manifest.write(attempt.path, made)
        except CheckpointError:
            _forget(attempt.path)
            raise

    def _places(self, plan: _Plan, written: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Where each box of this rank lies, by its name."""
        files = {entry[0]: name for name, entries in plan.files.items() for entry in entries}
        return {
            key: {"file": files[key], "start": start, "sums": sums}
            for key in (store.key_of(item.index) for item in plan.items)
            for start, sums in (written["boxes"][key],)
        }

    def _failure(self, attempt: _Attempt) -> CheckpointError:
        """Remove what was written. Returns what went wrong on the lowest rank that failed."""
        ours = attempt.error and (attempt.error.what, attempt.error.mend)
        found = self._mesh.world.control.gather(ours, "what failed")
        if self._mesh.rank == 0 and attempt.path is not None:
            _forget(attempt.path)
        rank, (what, mend) = next((rank, error) for rank, error in enumerate(found) if error)
        return CheckpointError(f"rank {rank}: {what}", mend=mend)


def _make(folder: Location, step: int) -> Location:
    path = store.fresh_folder(folder, step)
    path.make()
    return path


def _forget(path: Location) -> None:
    """Remove an attempt. What cannot be removed now is removed when the run starts again."""
    with contextlib.suppress(OSError):
        path.remove()
