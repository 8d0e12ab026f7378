"""Asynchronous saving (MegaScale, section 4): copy the state to host memory, and train on while a process writes it.

    rank     train | copy | train ......................... | manifest | train
    writer                  write files, compute checksums

The per-step all-reduce of metrics also sums the results of `poll`: all ranks learn in the same step that all writers
are done, and call `complete` together.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megascale.checkpoint import folders
from megascale.checkpoint.collective_errors import on_first_rank
from megascale.checkpoint.companions import copy_companions
from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.state import split_shards
from megascale.checkpoint.save.attempt import SaveAttempt, SaveResult
from megascale.checkpoint.save.snapshot import Snapshot
from megascale.checkpoint.save.writer_process import WriterProcess
from megascale.comm.mesh import Mesh
from megascale.core.errors import CheckpointError
from megascale.core.limits import os_error_hint
from megascale.core.run_folder import check_known
from megascale.core.storage import WRITE_HINT, Location
from megascale.device import Device
from megascale.parallel.stateful import GlobalTensor

if TYPE_CHECKING:
    from megascale.checkpoint.memory.memory_checkpoints import MemoryCheckpoints
    from megascale.checkpoint.save.write_plan import WritePlan

_NewFolder = tuple[Location, dict[str, manifest.StoredFile]]
"""The folder of a checkpoint, and the companions in it."""


class CheckpointSaver:
    """Saves `state`: `start` a save, `poll` in every step, and `complete` with the sums of `poll` over ranks.

    The shards of `state` are parts of `flat_tensors`. All methods except `poll` are collective; `complete` communicates
    only once the sums say that every rank is done. With `memory_checkpoints`, snapshots are in-memory checkpoints: two
    slots, used in turn, that outlive the process. `companions`: a folder of files, such as a tokenizer, to copy into
    each checkpoint. `meaning`: text of what the state means beyond its names and shapes. `fault_hook`: called with
    "snapshot" before the copy, "write" before the writer's request, and "commit" before the end of the save.
    """

    def __init__(
        self,
        state: Mapping[str, GlobalTensor],
        flat_tensors: Sequence[Tensor],
        file_bytes: int,
        memory_checkpoints: MemoryCheckpoints | None,
        companions: Path,
        meaning: str,
        mesh: Mesh,
        device: Device,
    ) -> None:
        self._mesh = mesh
        self._companions = companions
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
        self._attempt: SaveAttempt | None = None
        self.fault_hook: Callable[[str], None] = lambda moment: None

    @property
    def writer_pid(self) -> int:
        """Process id of the writer."""
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
        new_folder = None
        if folder is not None and self._mesh.rank == 0:
            new_folder = self._mkdir_thread.submit(_make_folder, folder, facts.progress.step, self._companions)
        slot = self._memory_checkpoints.next_slot() if self._memory_checkpoints else 0
        self._slots[slot].copy_from_tensors()
        path = self._share_folder(folder, new_folder) if folder is not None else None
        companions = new_folder.result()[1] if new_folder else {}
        if path is not None and self._plan is None:
            from megascale.checkpoint.save.write_plan import make_write_plan  # torch's planners take a second to import

            self._plan = make_write_plan(self._state, self._slots[0], self._file_bytes, self._mesh)  # of all slots
        plan = None if path is None else self._plan
        self._attempt = attempt = SaveAttempt(self._mesh, facts, slot, path, plan, waited_s, companions)
        self.fault_hook("write")
        self._writer.submit(self._writer_request(attempt))
        attempt.stalled_s = time.monotonic() - start

    def _share_folder(self, folder: Location, new_folder: Future[_NewFolder] | None) -> Location:
        """Return the folder that rank 0 has created. `new_folder`: its future on rank 0, None on other ranks.

        Raises: CheckpointError on every rank if the folder could not be created
        """

        def name() -> str:
            assert new_folder is not None, "rank 0 creates it"
            try:
                return new_folder.result()[0].name
            except OSError as error:
                what = f"rank 0: cannot make {error.filename}: {error.strerror or error}"
                raise CheckpointError(what, hint=os_error_hint(error, WRITE_HINT)) from None

        return folder / on_first_rank(self._mesh.world, name, "the folder of a checkpoint")

    def _writer_request(self, attempt: SaveAttempt) -> dict[str, dict[str, Any]]:
        """Return the request to the writer (`writer.execute`).

        With memory checkpoints `write_copy_header` makes the copy a valid in-memory checkpoint. A save to storage adds
        `write_files`; an in-memory save adds `send_replica`, which sends this rank's copy to another host.
        """
        memory, snapshot_path = self._memory_checkpoints, self._slots[attempt.slot].path
        request: dict[str, dict[str, Any]] = {}
        if memory:
            request["write_copy_header"] = {
                "snapshot_path": snapshot_path,
                "path": str(memory.header_path(attempt.slot)),
                "header": memory.header_fields(self._layout_hash, attempt.facts),
            }
        if attempt.path is not None and attempt.plan is not None:
            request["write_files"] = {
                "snapshot_path": snapshot_path,
                "folder": attempt.path.url,
                "retry_s": attempt.path.retry_s,
                "checksum_block_bytes": attempt.plan.checksum_block_bytes,
                "files": attempt.plan.files,
            }
        elif memory and (sender_args := memory.replica_args(attempt.slot)):
            request["send_replica"] = sender_args
        return request

    def load_from_memory(self, min_step: int) -> tuple[manifest.Facts | None, list[str]]:
        """Load the newest in-memory checkpoint of step `min_step` or later. Returns its facts or None, and warnings."""
        if self._memory_checkpoints is None:
            return None, []
        return self._memory_checkpoints.load_newest(self._slots, self._layout_hash, self._writer, min_step)

    def poll(self, *, wait: bool = False) -> tuple[float, float]:
        """Return this rank's (written, failed) of the save in progress: 1.0 or 0.0, for a sum over ranks.

        `written`: the writer has served the request, including for in-memory saves. `wait`: block until then.
        """
        return self._attempt.poll(self._writer, wait=wait) if self._attempt else (0.0, 0.0)

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
        saved = attempt.finish(failed=bool(failed))
        if saved.error is None and self._memory_checkpoints:  # a slot that is not marked is reused by the next save
            self._memory_checkpoints.mark_complete(attempt.slot)
        return saved

    def wait(self) -> SaveResult | None:
        """Wait for the save in progress and complete it; return None without a save."""
        if self._attempt is None:
            return None
        failed = sum(self._mesh.world.control.all_gather(self.poll(wait=True)[1], "the end of a checkpoint"))
        return self.complete(self._mesh.world.size - failed, failed)


def _hash_layout(state: Mapping[str, GlobalTensor], snapshot: Snapshot, meaning: str) -> str:
    """Hash the shards in a snapshot, their offsets and their meaning: only state of equal hashes is interchangeable."""
    offsets = {
        name: [[*shard.offset, *shard.size, snapshot.offset_of(shard.data)] for shard in tensor.shards]
        for name, tensor in state.items()
    }
    return hashlib.sha256(json.dumps([snapshot.size, offsets, meaning]).encode()).hexdigest()


def _make_folder(folder: Location, step: int, companions: Path) -> _NewFolder:
    """Create the folder of a checkpoint, with copies of the run's companion files."""
    check_known(companions.parent)
    path = folders.fresh_folder(folder, step)
    path.make_folder()
    return path, copy_companions(Location(str(companions)), path)
