"""Folders of checkpoints: list complete ones and unfinished attempts, name a fresh folder, delete old ones.

Every checkpoint gets a folder of its own, `step-00000500`, with safetensors files and a JSON manifest that is renamed
into place last. A folder without a manifest is an unfinished attempt, and is never read. torch's own file writer
unpickles, reuses folders and has no checksums; here nothing is executed, and every byte read is checked.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from megascale.checkpoint.format import manifest
from megascale.core.errors import CheckpointError
from megascale.core.limits import os_error_hint
from megascale.core.storage import Location

_FOLDER = re.compile(r"step-(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on storage; `attempt` counts the folders of the same step."""

    path: Location
    step: int
    attempt: int


def complete_checkpoints(folder: Location) -> list[StoredCheckpoint]:
    """List the complete checkpoints in a folder, oldest step first. There is no pointer file that could be stale.

    Raises: CheckpointError
    """
    return sorted(list_checkpoints(folder, complete=True), key=lambda stored: (stored.step, stored.attempt))


def list_checkpoints(folder: Location, *, complete: bool) -> Iterator[StoredCheckpoint]:
    """Yield complete checkpoints, or attempts without a manifest: aborted, or in progress. Raises: CheckpointError"""
    try:
        for name in folder.list_names():
            match = _FOLDER.fullmatch(name)
            if match and (folder / name / manifest.NAME).exists() == complete and (folder / name).is_folder():
                yield StoredCheckpoint(folder / name, int(match.group(1)), int(match.group(2) or 0))
    except OSError as error:
        what = f"cannot look into {error.filename or folder}: {error.strerror}"
        raise CheckpointError(what, hint=os_error_hint(error, "checkpoint.dir, permissions, the network")) from None


def find_checkpoint(path: Location) -> Location:
    """Return a checkpoint by its own folder, or the newest complete one of a run by the run's folder.

    Raises: CheckpointError if there is none
    """
    return find_checkpoints(path)[0]


def find_checkpoints(path: Location) -> list[Location]:
    """Return a checkpoint by its own folder, or all complete ones of a run, newest first.

    Raises: CheckpointError if there is none
    """
    try:
        if (path / manifest.NAME).exists():
            return [path]
    except OSError as error:
        what = f"cannot look into {path}: {error.strerror}"
        raise CheckpointError(what, hint=os_error_hint(error, "its name, permissions, the network")) from None
    of_run, own = (complete_checkpoints(folder) for folder in (path / "checkpoints", path))
    if of_run and own:
        what = f"{path} has checkpoints, such as {own[-1].path.name}, and a folder of checkpoints"
        raise CheckpointError(what, hint=f"name one: {own[-1].path} or {path / 'checkpoints'}")
    if complete := of_run or own:
        return [stored.path for stored in reversed(complete)]
    what = f"there is no complete checkpoint in {path}" if path.is_folder() else f"there is no folder {path}"
    raise CheckpointError(what, hint="give a checkpoint's folder, or a run's")


def name_warning(path: Location, step: int) -> str | None:
    """Return a warning if the name of a checkpoint's folder is of another step than `step`, its manifest's, by which a
    run resumes; pruning goes by the name.
    """
    match = _FOLDER.fullmatch(path.name)
    if not match or int(match.group(1)) == step:
        return None
    return f"{path} holds step {step} by its manifest, which counts, and another by its name: rename it step-{step:08d}"


def fresh_folder(folder: Location, step: int) -> Location:
    """Return an unused folder for a checkpoint of `step`, without making it. Raises: OSError"""
    used = set(folder.list_names())
    names = (f"step-{step:08d}" + (f".{attempt}" if attempt else "") for attempt in itertools.count())
    return folder / next(name for name in names if name not in used)


def remove_unfinished(folder: Location) -> list[str]:
    """Delete unfinished attempts; no other process may be writing. Returns why some could not be deleted.

    Raises: CheckpointError if the folder cannot be read
    """
    return [
        problem.message
        for problem in _remove_all([attempt.path for attempt in list_checkpoints(folder, complete=False)])
    ]


def prune(folder: Location, keep: int, every: int = 0, excluded: Collection[Location] = ()) -> None:
    """Delete complete checkpoints except the newest `keep` and every step divisible by `every`.

    With `keep = 0` all stay. Damaged checkpoints (`excluded`) stay and do not count.

    Raises: CheckpointError if some could not be deleted; the rest are
    """
    counted = [stored for stored in complete_checkpoints(folder) if stored.path not in excluded]
    old = [stored.path for stored in (counted[:-keep] if keep else []) if not every or stored.step % every]
    if problems := _remove_all(old):
        rest = f", nor can {len(problems) - 1} more" if len(problems) > 1 else ""
        raise CheckpointError(problems[0].message + rest, hint=problems[0].hint)


class Pruner:
    """Calls `prune` on a thread, one call at a time: a checkpoint may have thousands of files."""

    def __init__(self, folder: Location, keep: int, every: int) -> None:
        self._arguments = folder, keep, every
        self._thread = ThreadPoolExecutor(1, "checkpoint-prune")
        self._deletion: Future[None] | None = None

    def start(self, excluded: Collection[Location]) -> None:
        """Wait for the deletion in progress, then start the next. Raises: CheckpointError if the former failed"""
        try:
            self.wait()
        finally:
            self._deletion = self._thread.submit(prune, *self._arguments, excluded=list(excluded))

    def wait(self) -> None:
        deletion, self._deletion = self._deletion, None
        if deletion is not None:
            deletion.result()


def _remove_all(paths: Sequence[Location]) -> list[CheckpointError]:
    """Delete checkpoints, the manifest first, and return the errors. A symbolic link goes without its target."""
    problems = []
    for path in paths:
        try:
            if not (path.local_path and path.local_path.is_symlink()):
                (path / manifest.NAME).remove()
            path.remove()
        except OSError as error:
            hint = os_error_hint(error, "check permissions")
            problems.append(CheckpointError(f"{path} cannot be removed: {error.strerror}", hint=hint))
    return problems
