"""A save in progress on this rank (`SaveAttempt`) and its outcome (`SaveResult`).

Rank 0 writes the manifest after the files of all ranks: a folder without a manifest is no checkpoint. If a rank fails,
the files of all ranks are removed.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megascale.checkpoint.collective_errors import on_all_ranks, on_first_rank
from megascale.checkpoint.format import manifest
from megascale.checkpoint.save.writer_process import WriterProcess
from megascale.comm.mesh import Mesh
from megascale.core.errors import CheckpointError
from megascale.core.storage import Location
from megascale.core.wait_notice import WaitNotice

if TYPE_CHECKING:
    from megascale.checkpoint.save.write_plan import WritePlan


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
class SaveAttempt:
    """A save in progress on this rank. Once the writer is done, `response` or `error` is set.

    `path`, `plan`: of a save to storage; None for an in-memory copy. `waited_s`, `stalled_s`: as in `SaveResult`.
    `companions`: on the first rank, the files that are in the folder already.
    """

    mesh: Mesh
    facts: manifest.Facts
    slot: int
    path: Location | None
    plan: WritePlan | None
    waited_s: float
    companions: Mapping[str, manifest.StoredFile]
    stalled_s: float = 0.0
    started_at: float = field(default_factory=time.monotonic)
    response: Mapping[str, Any] | None = None
    error: CheckpointError | None = None

    def poll(self, writer: WriterProcess, *, wait: bool) -> tuple[float, float]:
        """Return this rank's (written, failed): 1.0 or 0.0, for a sum over ranks. `wait`: wait for the writer."""
        if self.response is None and self.error is None:
            # in place of a timeout: unresponsive storage, such as a lost mount, blocks the writer forever
            notice = WaitNotice(f"rank {self.mesh.rank}")
            try:
                while (response := writer.response(notice.due_in_s if wait else 0.0)) is None and wait:
                    notice.print_if_due(functools.partial(self._describe_writer, writer.pid))
                self.response = response
            except CheckpointError as error:
                self.error = error
        return float(self.response is not None), float(self.error is not None)

    def finish(self, *, failed: bool) -> SaveResult:
        """Write the manifest, or if a rank has `failed` remove the files. Collective, once every rank is done."""
        error = self._abort() if failed else self._commit()
        write_s = time.monotonic() - self.started_at
        return SaveResult(self.path, self.facts.progress.step, self.waited_s, self.stalled_s, write_s, error)

    def _describe_writer(self, pid: int) -> str:
        written = f"{self.path or 'a copy'} for {time.monotonic() - self.started_at:.0f} s"
        return f"its writer, process {pid}, which has been writing {written}: is the storage responsive?"

    def _commit(self) -> CheckpointError | None:
        """Gather the shard locations and write the manifest on rank 0, which removes the files if it cannot. Returns
        its error on every rank.
        """
        path, plan = self.path, self.plan
        if path is None:
            return None
        assert plan is not None and self.response is not None
        local_files = plan.shard_locations(self.response["locations"]), self.response["files"]
        ranks = self.mesh.world.control.gather(local_files, "the written shards")

        def write_manifest() -> None:
            try:
                manifest.write(path, plan.build_manifest(self.facts, ranks or [], self.companions))
            except CheckpointError:
                _remove_files(path)
                raise

        try:
            on_first_rank(self.mesh.world, write_manifest, "the manifest")
        except CheckpointError as error:
            return error
        return None

    def _abort(self) -> CheckpointError:
        """Remove the files. Returns the error of the lowest rank that knows the cause."""

        def report() -> None:
            if self.error is not None:
                raise self.error

        try:
            on_all_ranks(self.mesh.world, report, "errors of a save")
        except CheckpointError as error:
            return error
        finally:
            if self.mesh.rank == 0 and self.path is not None:
                _remove_files(self.path)
        raise AssertionError("no rank has failed")


def _remove_files(path: Location) -> None:
    """Remove the files of an attempt. Files that cannot be removed are deleted at the next start of the run."""
    with contextlib.suppress(OSError):
        path.remove()
