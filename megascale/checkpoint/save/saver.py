"""Asynchronous saving (MegaScale, section 4): copy the state to host memory, and train on while a process writes it.

    rank     train | copy | train ......................... | manifest | train
    writer                  write files, compute checksums

The per-step all-reduce of metrics also sums the results of `poll`: all ranks learn in the same step that all writers
are done, and call `complete` together. Rank 0 writes the manifest after the files of all ranks: a folder without a
manifest is no checkpoint. If a rank fails, the files of all ranks are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megascale.checkpoint.collective_errors import on_all_ranks, on_first_rank
from megascale.checkpoint.companions import FOLDER, make_checkpoint_folder
from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.state import split_shards
from megascale.checkpoint.save.snapshot import Snapshot
from megascale.checkpoint.save.write_plan import WritePlan, make_write_plan
from megascale.checkpoint.save.writer_process import WriterProcess
from megascale.core.errors import CheckpointError
from megascale.core.wait_notice import WaitNotice

if TYPE_CHECKING:
    from megascale.checkpoint.memory.memory_checkpoints import CanLose, MemoryCheckpoints
    from megascale.comm.mesh import Mesh
    from megascale.core.storage import Location
    from megascale.device import Device
    from megascale.parallel.stateful import GlobalTensor


@dataclass(frozen=True)
class SaveResult:
    """The outcome of a save; `error` if it failed, and then the removal of its files was attempted.

    `path`: None for an in-memory copy. In seconds: `waited_s`, training waited for the end of the previous save;
    `stalled_s`, training paused for the copy; `write_s`, from the copy to the end of the save.
    """

    path: Location | None
    step: int
    waited_s: float
    stalled_s: float
    write_s: float
    error: CheckpointError | None


@dataclass
class _Attempt:
    """A save in progress on this rank. Once the writer is done, `response` or `error` is set.

    `path`: None for an in-memory copy. `waited_s`, `stalled_s`: as in `SaveResult`. `companions`: on the first rank,
    the files that are in the folder already.
    """

    facts: manifest.Facts
    slot: int
    path: Location | None
    waited_s: float
    companions: Mapping[str, manifest.StoredFile]
    started_at: float
    stalled_s: float = 0.0
    response: Mapping[str, Any] | None = None
    error: CheckpointError | None = None


class CheckpointSaver:
    """Saves `state`: `start` a save, `poll` in every step, and `complete` with the sums of `poll` over ranks.

    The shards of `state` are parts of `flat_tensors`. All methods except `poll` are collective; `complete` communicates
    only once the sums say that every rank is done. With `memory_checkpoints`, snapshots are in-memory checkpoints: two
    slots, used in turn, that outlive the process. `run`: the run's folder, whose companions are copied into each
    checkpoint. `meaning`: text of what the state means beyond its names and shapes. `fault_hook`: called with
    "snapshot" before the copy, "write" before the writer's request, and "commit" before the end of the save.
    """

    def __init__(
        self,
        state: Mapping[str, GlobalTensor],
        flat_tensors: Sequence[Tensor],
        file_bytes: int,
        memory_checkpoints: MemoryCheckpoints | None,
        run: Path,
        meaning: str,
        mesh: Mesh,
        device: Device,
    ) -> None:
        self._mesh = mesh
        self._companions = run / FOLDER
        self._state = split_shards(state, file_bytes)
        self._file_bytes = file_bytes
        self._memory_checkpoints = memory_checkpoints
        receiver_args = None
        if memory_checkpoints is None:
            self._slots = [Snapshot(flat_tensors, device)]
        else:
            self._slots = memory_checkpoints.allocate_slots(flat_tensors, device)
            receiver_args = memory_checkpoints.receiver_args  # the writer also receives replicas of others' copies
        self._writer = WriterProcess([slot.descriptor for slot in self._slots], receiver_args)
        self._mkdir_thread = ThreadPoolExecutor(1, "checkpoint-mkdir")
        self._layout_hash = _hash_layout(self._state, self._slots[0], meaning)
        self._plan: WritePlan | None = None
        self._attempt: _Attempt | None = None
        self.fault_hook: Callable[[str], None] = lambda moment: None

    @property
    def writer_pid(self) -> int:
        return self._writer.pid

    @property
    def in_progress(self) -> bool:
        """True from `start` until the save is complete or has failed."""
        return self._attempt is not None

    @property
    def step_in_progress(self) -> int | None:
        """The step of the save to storage in progress; None without one."""
        return self._attempt.facts.progress.step if self._attempt and self._attempt.path else None

    def start(self, folder: Location | None, facts: manifest.Facts, waited_s: float = 0.0) -> None:
        """Copy the state, and let the writer store the copy in a new folder within `folder`.

        Rank 0 creates the folder in a thread, during the copy. Without `folder` the copy stays in memory. `facts`: the
        run's configuration and progress, for the manifest. `waited_s`: seconds of waiting for the previous save,
        reported in `SaveResult`.

        Raises: CheckpointError on every rank if the folder cannot be created
        """
        start = time.monotonic()
        assert self._attempt is None, "a save is in progress"
        self.fault_hook("snapshot")
        made = None
        if folder is not None and self._mesh.rank == 0:
            made = self._mkdir_thread.submit(make_checkpoint_folder, folder, facts.progress.step, self._companions)
        slot = self._memory_checkpoints.next_slot() if self._memory_checkpoints else 0
        self._slots[slot].copy_from_tensors()
        path = None
        if folder is not None:
            world, label = self._mesh.world, "the folder of a checkpoint"
            path = folder / on_first_rank(world, lambda: made.result()[0].name if made else "", label)
        companions = made.result()[1] if made else {}
        if path is not None and self._plan is None:
            self._plan = make_write_plan(self._state, self._slots[0], self._file_bytes, self._mesh)  # of all slots
        self._attempt = attempt = _Attempt(facts, slot, path, waited_s, companions, time.monotonic())
        self.fault_hook("write")
        self._writer.submit(self._writer_request(attempt))
        attempt.stalled_s = time.monotonic() - start

    def _writer_request(self, attempt: _Attempt) -> dict[str, dict[str, Any]]:
        """Return the request to the writer (`writer.execute`): make the copy a valid in-memory checkpoint, with memory
        checkpoints, and write files or else send a replica.
        """
        snapshot_path = self._slots[attempt.slot].path
        request: dict[str, dict[str, Any]] = {}
        if self._memory_checkpoints:
            to_memory = attempt.path is None
            request = self._memory_checkpoints.writer_request(
                attempt.slot, snapshot_path, self._layout_hash, attempt.facts, replicate=to_memory
            )
        if attempt.path is not None and self._plan is not None:
            request["write_files"] = {
                "snapshot_path": snapshot_path,
                "folder": attempt.path.url,
                "retry_s": attempt.path.retry_s,
                "checksum_block_bytes": self._plan.checksum_block_bytes,
                "files": self._plan.files,
            }
        return request

    def load_from_memory(
        self, min_step: int, can_lose: CanLose
    ) -> tuple[manifest.Facts | None, frozenset[int], list[str]]:
        """Load the newest in-memory checkpoint (`MemoryCheckpoints.load_newest`); nothing without such checkpoints."""
        if self._memory_checkpoints is None:
            return None, frozenset(), []
        return self._memory_checkpoints.load_newest(self._slots, self._layout_hash, self._writer, min_step, can_lose)

    def poll(self, *, wait: bool = False) -> tuple[float, float]:
        """Return this rank's (written, failed) of the save in progress: 1.0 or 0.0, for a sum over ranks.

        `written`: the writer has served the request, including for in-memory saves. `wait`: block until then.
        """
        if (attempt := self._attempt) is None:
            return 0.0, 0.0

        def describe() -> str:
            written = f"{attempt.path or 'a copy'} for {time.monotonic() - attempt.started_at:.0f} s"
            what = f"its writer, process {self._writer.pid}, which has been writing {written}"
            return f"{what}: is the storage responsive?"

        if attempt.response is None and attempt.error is None:
            # in place of a timeout: unresponsive storage, such as a lost mount, blocks the writer forever
            notice = WaitNotice(f"rank {self._mesh.rank}")
            try:
                while (response := self._writer.response(notice.due_in_s if wait else 0.0)) is None and wait:
                    notice.print_if_due(describe)
                attempt.response = response
            except CheckpointError as error:
                attempt.error = error
        return float(attempt.response is not None), float(attempt.error is not None)

    def complete(self, written: float, failed: float) -> SaveResult | None:
        """Complete or abort the save once every rank is done; `written` and `failed` are sums of `poll` over ranks.

        Returns None while a writer is at work, and without a save in progress. Completing and aborting are collective;
        the sums are equal on all ranks, so all take the same branch.
        """
        attempt = self._attempt
        if attempt is None or written + failed < self._mesh.world.size:
            return None
        self._attempt = None
        self.fault_hook("commit")
        error = self._abort(attempt) if failed else self._commit(attempt)
        if error is None and self._memory_checkpoints:  # a slot that is not marked is reused by the next save
            self._memory_checkpoints.newest_complete_slot = attempt.slot
        step, write_s = attempt.facts.progress.step, time.monotonic() - attempt.started_at
        return SaveResult(attempt.path, step, attempt.waited_s, attempt.stalled_s, write_s, error)

    def wait(self) -> SaveResult | None:
        """Wait for the save in progress and complete it; return None without a save."""
        if self._attempt is None:
            return None
        failed = sum(self._mesh.world.control.all_gather(self.poll(wait=True)[1], "the end of a checkpoint"))
        return self.complete(self._mesh.world.size - failed, failed)

    def _commit(self, attempt: _Attempt) -> CheckpointError | None:
        """Gather what the writers have written and write the manifest on rank 0, which removes the files if it cannot.
        Returns its error on every rank.
        """
        path, plan = attempt.path, self._plan
        if path is None:
            return None
        assert plan is not None
        written = self._mesh.world.control.gather(attempt.response, "the written shards")

        def write_manifest() -> None:
            try:
                manifest.write(path, plan.build_manifest(attempt.facts, written or [], attempt.companions))
            except CheckpointError:
                _remove_files(path)
                raise

        try:
            on_first_rank(self._mesh.world, write_manifest, "the manifest")
        except CheckpointError as error:
            return error
        return None

    def _abort(self, attempt: _Attempt) -> CheckpointError:
        """Remove the files. Returns the error of the lowest rank that knows the cause."""

        def report() -> None:
            if attempt.error is not None:
                raise attempt.error

        try:
            on_all_ranks(self._mesh.world, report, "errors of a save")
        except CheckpointError as error:
            return error
        finally:
            if self._mesh.rank == 0 and attempt.path is not None:
                _remove_files(attempt.path)
        raise AssertionError("no rank has failed")


def _remove_files(path: Location) -> None:
    """Remove the files of an attempt. Files that cannot be removed are deleted at the next start of the run."""
    with contextlib.suppress(OSError):
        path.remove()


def _hash_layout(state: Mapping[str, GlobalTensor], snapshot: Snapshot, meaning: str) -> str:
    """Hash the shards in a snapshot, their offsets and their meaning: only state of equal hashes is interchangeable."""
    offsets = {
        name: [[*shard.offset, *shard.size, snapshot.offset_of(shard.data)] for shard in tensor.shards]
        for name, tensor in state.items()
    }
    return hashlib.sha256(json.dumps([snapshot.size, offsets, meaning]).encode()).hexdigest()
