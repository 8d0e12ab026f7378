"""Saving in two stages (MegaScale, section 4): copy the state and train on, while a writer process stores the copy.

    rank     train | copy | train ......................... | manifest | train
    writer                  write files, compute checksums

Each step's all-reduce of totals also carries `poll()`: all ranks learn in the same step that all writers are done, and
`complete` the save together.
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

from megascale.checkpoint import folders
from megascale.checkpoint.collective_errors import on_all_ranks, on_first_rank
from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.state import GlobalTensor, split_pieces
from megascale.checkpoint.memory.memory_checkpoints import SLOTS, MemoryCheckpoints
from megascale.checkpoint.save.snapshot import Snapshot
from megascale.checkpoint.save.write_plan import BOX_BYTES, HEADER_BYTES, WritePlan, make_write_plan
from megascale.checkpoint.save.writer_process import WriterProcess
from megascale.checkpoint.storage import WRITE_HINT, Location
from megascale.comm.mesh import Mesh
from megascale.core.errors import CheckpointError
from megascale.core.limits import os_error_hint
from megascale.device import Device

SLOW_WRITER_WARNING_S = 60.0
"""Period of the warning of a rank that waits for its writer, in seconds."""


@dataclass(frozen=True)
class SaveResult:
    """The outcome of a save; `error` if it failed, and then the removal of its files was attempted.

    `path`: None for an in-memory copy. In seconds: `waited_s`, for which training waited for the end of the previous
    save; `stalled_s`, for which it paused for the copy; `write_s`, from the copy to the end of the save.
    """

    path: Location | None
    step: int
    waited_s: float
    stalled_s: float
    write_s: float
    error: CheckpointError | None


@dataclass
class _SaveAttempt:
    """A save in progress on this rank. Once the writer is done, `reply` or `error` is set."""

    path: Location | None
    slot: int
    facts: manifest.Facts
    waited_s: float
    stalled_s: float
    started_at: float
    reply: Mapping[str, Any] | None = None
    error: CheckpointError | None = None


class CheckpointSaver:
    """Saves `state`, whose pieces are parts of `flat_tensors`. All methods except `poll` are collective.

    With `memory`, snapshots are in-memory checkpoints: two slots, used in turn, that outlive the process.
    """

    def __init__(
        self,
        state: Mapping[str, GlobalTensor],
        flat_tensors: Sequence[Tensor],
        file_bytes: int,
        memory: MemoryCheckpoints | None,
        mesh: Mesh,
        device: Device,
    ) -> None:
        self._mesh = mesh
        self._state = split_pieces(state, min(BOX_BYTES, file_bytes - HEADER_BYTES))
        self._file_bytes = file_bytes
        self._memory = memory
        if memory is None:
            self._slots = [Snapshot(flat_tensors, device)]
            self._writer = WriterProcess([self._slots[0].descriptor])
        else:
            self._slots = _allocate_slots(flat_tensors, memory, mesh, device)
            # The writer also receives replicas of other ranks' copies: on the socket of `receiver_args`.
            self._writer = WriterProcess(
                [*memory.listeners, *(slot.descriptor for slot in self._slots)], memory.receiver_args
            )
        self._mkdir_thread = ThreadPoolExecutor(1, "checkpoint-mkdir")
        self._layout_hash = _hash_layout(self._state, self._slots[0])
        self._plan: WritePlan | None = None
        self._attempt: _SaveAttempt | None = None

    @property
    def writer_pid(self) -> int:
        """Process id of the writer."""
        return self._writer.pid

    @property
    def in_progress(self) -> bool:
        """True from `start` until the save is complete or has failed."""
        return self._attempt is not None

    def start(self, folder: Location | None, facts: manifest.Facts, waited_s: float = 0.0) -> None:
        """Copy the state, and let the writer store the copy in a new folder within `folder`.

        The first rank makes the folder in a thread, during the copy. Without `folder` the copy stays in memory.
        `waited_s`: seconds of waiting for the previous save, for the result.

        Raises: CheckpointError on every rank if the folder cannot be made
        """
        start = time.monotonic()
        assert self._attempt is None, "a save is in progress"
        new_folder = None
        if folder is not None and self._mesh.rank == 0:
            new_folder = self._mkdir_thread.submit(_make_folder, folder, facts.progress.step)
        slot = self._memory.next_slot() if self._memory else 0
        self._slots[slot].copy_from_tensors()
        path = self._share_folder(folder, new_folder) if folder is not None else None
        if path is not None:
            # The plan holds for every save and slot: all slots have the same offsets.
            self._plan = self._plan or make_write_plan(self._state, self._slots[0], self._file_bytes, self._mesh)
        self._attempt = attempt = _SaveAttempt(
            path, slot, facts, waited_s=waited_s, stalled_s=0.0, started_at=time.monotonic()
        )
        self._writer.submit(**self._writer_tasks(attempt))
        attempt.stalled_s = time.monotonic() - start

    def _share_folder(self, folder: Location, new_folder: Future[Location] | None) -> Location:
        """Return the folder that the first rank has made; `new_folder`: its future there, None on other ranks.

        Raises: CheckpointError on every rank if the folder could not be made
        """

        def name() -> str:
            assert new_folder is not None, "the first rank makes it"
            try:
                return new_folder.result().name
            except OSError as error:
                what = f"rank 0: cannot make {error.filename}: {error.strerror or error}"
                raise CheckpointError(what, hint=os_error_hint(error, WRITE_HINT)) from None

        return folder / on_first_rank(self._mesh.world, name, "the folder of a checkpoint")

    def _writer_tasks(self, attempt: _SaveAttempt) -> dict[str, dict[str, Any]]:
        """Return the writer's tasks. With memory, `keep` makes the copy a valid in-memory checkpoint. A save to storage
        adds `write`, for the files; an in-memory save adds `send`, for a replica on another host.
        """
        memory, copy = self._memory, self._slots[attempt.slot].path
        tasks: dict[str, dict[str, Any]] = {}
        if memory:
            header = memory.header_fields(self._layout_hash, attempt.facts)
            tasks["keep"] = {"memory": copy, "path": str(memory.header_path(attempt.slot)), "header": header}
        if attempt.path is not None and self._plan is not None:
            target = {"folder": attempt.path.url, "retry_s": attempt.path.retry_s}
            tasks["write"] = {"memory": copy, "chunk": self._plan.chunk, "files": self._plan.files} | target
        elif memory and memory.replica_rank is not None:
            tasks["send"] = memory.sender_args(memory.copy_path(attempt.slot), memory.replica_rank)  # of this rank
        return tasks

    def load_from_memory(self, min_step: int) -> tuple[manifest.Facts | None, list[str]]:
        """Load the newest in-memory checkpoint of step `min_step` or later. Returns its facts or None, and warnings."""
        if self._memory is None:
            return None, []
        return self._memory.load_newest(self._slots, self._layout_hash, self._writer, min_step)

    def poll(self, *, wait: bool = False) -> tuple[float, float]:
        """Return this rank's (written, failed) of the save in progress: 1.0 or 0.0, for a sum over ranks.

        `written`: all tasks of the writer are done, also of an in-memory save. `wait`: wait for the end.
        """
        attempt = self._attempt
        if attempt is None:
            return 0.0, 0.0
        if attempt.reply is None and attempt.error is None:
            try:
                while (reply := self._writer.result(SLOW_WRITER_WARNING_S if wait else 0.0)) is None and wait:
                    self._warn_slow_writer(attempt)
                attempt.reply = reply
            except CheckpointError as error:
                attempt.error = error
        return float(attempt.reply is not None), float(attempt.error is not None)

    def _warn_slow_writer(self, attempt: _SaveAttempt) -> None:
        """Warn on stderr, in place of a timeout. Storage without an answer, such as a lost mount, blocks the writer in
        the kernel forever.
        """
        print(
            f"WARNING: rank {self._mesh.rank} waits for its writer, process {self.writer_pid}, which has been writing "
            f"{attempt.path or 'a copy'} for {time.monotonic() - attempt.started_at:.0f} s: does the storage answer?",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    def complete(self, written: float, failed: float) -> SaveResult | None:
        """Complete or abort the save once every rank is done; `written` and `failed` are sums of `poll` over ranks.

        Returns None while a writer is at work, and without a save in progress. Equal sums make all ranks take the same
        branch: both are collective.
        """
        attempt = self._attempt
        if attempt is None or written + failed < self._mesh.world.size:
            return None
        self._attempt = None
        error = self._abort(attempt) if failed else self._commit(attempt)
        if error is None and self._memory:  # after a failed write the next save overwrites the copy
            self._memory.mark_complete(attempt.slot)
        write_s = time.monotonic() - attempt.started_at
        step = attempt.facts.progress.step
        return SaveResult(attempt.path, step, attempt.waited_s, attempt.stalled_s, write_s, error)

    def wait(self) -> SaveResult | None:
        """Wait for the save in progress and complete it; return None without a save."""
        if self._attempt is None:
            return None
        failed = sum(self._mesh.world.control.all_gather(self.poll(wait=True)[1], "the end of a checkpoint"))
        return self.complete(self._mesh.world.size - failed, failed)

    def _commit(self, attempt: _SaveAttempt) -> CheckpointError | None:
        """Gather the box locations and write the manifest on the first rank. Returns its error on every rank."""
        if attempt.path is None:
            return None
        assert self._plan is not None and attempt.reply is not None
        local_files = self._plan.box_locations(attempt.reply["boxes"]), attempt.reply["files"]
        ranks = self._mesh.world.control.gather(local_files, "the written boxes")
        try:
            on_first_rank(self._mesh.world, lambda: self._write_manifest(attempt, ranks or []), "the manifest")
        except CheckpointError as error:
            return error
        return None

    def _write_manifest(self, attempt: _SaveAttempt, ranks: Sequence[Any]) -> None:
        """Write the manifest, or remove the files.

        Raises: CheckpointError
        """
        assert attempt.path is not None and self._plan is not None
        try:
            manifest.write(attempt.path, self._plan.build_manifest(attempt.facts, ranks))
        except CheckpointError:
            _remove_attempt(attempt.path)
            raise

    def _abort(self, attempt: _SaveAttempt) -> CheckpointError:
        """Remove the files. Returns the error of the lowest rank that failed."""
        local_error = attempt.error and (attempt.error.message, attempt.error.hint)
        errors = self._mesh.world.control.all_gather(local_error, "errors of a save")
        if self._mesh.rank == 0 and attempt.path is not None:
            _remove_attempt(attempt.path)
        rank, (what, hint) = next((rank, error) for rank, error in enumerate(errors) if error)
        return CheckpointError(f"rank {rank}: {what}", hint=hint)


def _allocate_slots(tensors: Sequence[Tensor], memory: MemoryCheckpoints, mesh: Mesh, device: Device) -> list[Snapshot]:
    """Allocate the slots of in-memory checkpoints.

    Raises: CheckpointError on every rank if a rank has no memory; the memory of all ranks is freed
    """

    def allocate() -> list[Snapshot]:
        return [Snapshot(tensors, device, memory.copy_path(slot)) for slot in range(len(SLOTS))]

    try:
        return on_all_ranks(mesh.world, allocate, "memory for copies")
    except CheckpointError:
        memory.remove_unused()
        raise


def _hash_layout(state: Mapping[str, GlobalTensor], snapshot: Snapshot) -> str:
    """Hash the boxes of a snapshot and their offsets: equal hashes mean equal layout."""
    offsets = {
        name: [[*piece.offset, *piece.size, snapshot.offset_of(piece.data)] for piece in tensor.pieces]
        for name, tensor in state.items()
    }
    return hashlib.sha256(json.dumps([snapshot.size, offsets]).encode()).hexdigest()


def _make_folder(folder: Location, step: int) -> Location:
    path = folders.fresh_folder(folder, step)
    path.make_folder()
    return path


def _remove_attempt(path: Location) -> None:
    """Remove the files of an attempt. Files that cannot be removed are deleted at the next start of the run."""
    with contextlib.suppress(OSError):
        path.remove()
