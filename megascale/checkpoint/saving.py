"""Saving in two stages (MegaScale 4): a rank copies its state and trains on; another process writes the copy.

What a rank knows of its writer travels with the sums of a step, so that all ranks know in the same step that nobody
writes any more.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from megascale.checkpoint import manifest, store
from megascale.checkpoint.background import Background
from megascale.checkpoint.plan import SavePlanner
from megascale.checkpoint.snapshot import Snapshot
from megascale.checkpoint.state import GlobalTensor
from megascale.comm.collectives import broadcast_object, collect_objects, gather_objects, scatter_objects
from megascale.comm.mesh import Mesh
from megascale.core.errors import CheckpointError
from megascale.device import Device

FORMATS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""As safetensors name them."""


@dataclass(frozen=True)
class Saved:
    """What became of an attempt: `error` if it failed, and then nothing of it is left. Seconds: `stalled`, that
    training stood still; `written`, from then until it was complete.
    """

    path: Path
    step: int
    stalled: float
    written: float
    error: CheckpointError | None


@dataclass
class _Attempt:
    path: Path
    facts: manifest.Facts
    stalled: float
    since: float
    checksums: Mapping[str, int] | None = None
    error: CheckpointError | None = None


@dataclass(frozen=True)
class _Plan:
    """What this rank writes, and on the first rank what all write together."""

    items: Sequence[WriteItem]
    entries: list[list[Any]]
    metadata: Metadata | None


class Saving:
    """Writes checkpoints of `state`, of which `held` are the flat tensors that its pieces are parts of. Every rank
    calls the same methods in the same steps, but for `poll`.
    """

    def __init__(self, state: Mapping[str, GlobalTensor], held: Sequence[Tensor], mesh: Mesh, device: Device) -> None:
        self._mesh = mesh
        self._state = state
        self._snapshot = Snapshot(held, device)
        self._background = Background(self._snapshot.descriptor)
        self._file = f"rank-{mesh.rank:05d}.safetensors"
        self._plan: _Plan | None = None
        self._attempt: _Attempt | None = None

    @property
    def writer(self) -> int:
        """The number of the process that writes."""
        return self._background.pid

    def begin(self, path: Path, facts: manifest.Facts) -> None:
        """Copy the state and have it written to a folder, which is made, while training goes on.

        Raises: CheckpointError on every rank if the folder cannot be made
        """
        start = time.monotonic()
        assert self._attempt is None, "one is under way"
        problem = broadcast_object(self._mesh.world, _made(path) if self._mesh.rank == 0 else "")
        if problem:
            raise CheckpointError(f"rank 0: cannot make {path}: {problem}", mend="check space and permissions")
        self._plan = self._plan or self._planned()
        self._snapshot.take()
        self._attempt = _Attempt(path, facts, time.monotonic() - start, time.monotonic())
        if self._plan.entries:
            self._background.write(path / self._file, self._plan.entries)
        else:
            self._attempt.checksums = {}

    def poll(self, *, wait: bool = False) -> tuple[float, float]:
        """Whether this rank has written its part of the attempt, and whether it has failed to: 1 or 0 each."""
        attempt = self._attempt
        if attempt is None:
            return 0.0, 0.0
        if attempt.checksums is None and attempt.error is None:
            try:
                attempt.checksums = self._background.answer(wait=wait)
            except CheckpointError as error:
                attempt.error = error
        return float(attempt.checksums is not None), float(attempt.error is not None)

    def settle(self, written: float, failed: float) -> Saved | None:
        """What became of the attempt, once the sums of `poll` over all ranks say that nobody writes any more: it is
        complete, or gone. None before, and without one.
        """
        attempt = self._attempt
        if attempt is None or written + failed < self._mesh.world.size:
            return None
        self._attempt = None
        error = self._failure(attempt) if failed else self._complete(attempt)
        passed = time.monotonic() - attempt.since
        return Saved(attempt.path, attempt.facts.progress.step, attempt.stalled, passed, error)

    def finish(self) -> Saved | None:
        """Wait for the attempt under way; None without one."""
        if self._attempt is None:
            return None
        failed = sum(gather_objects(self._mesh.world, self.poll(wait=True)[1]))
        return self.settle(self._mesh.world.size - failed, failed)

    def _planned(self) -> _Plan:
        """Which pieces this rank writes: the same at every save, for the layout is."""
        planner = SavePlanner()
        planner.set_up_planner(self._state, is_coordinator=self._mesh.rank == 0)
        plans = collect_objects(self._mesh.world, planner.create_local_plan())
        metadata = None
        if plans is not None:
            plans, metadata = planner.create_global_plan(list(plans))
        plan = planner.finish_plan(scatter_objects(self._mesh.world, plans))
        entries = []
        for item in plan.items:
            data = planner.resolve_data(item)
            key = store.key_of(item.index)
            entries.append([key, FORMATS[data.dtype], list(data.shape), self._snapshot.place(data), data.nbytes])
        return _Plan(plan.items, entries, metadata)

    def _complete(self, attempt: _Attempt) -> CheckpointError | None:
        """Gather what was written, and on the first rank write the manifest. Returns what failed there."""
        assert self._plan is not None and attempt.checksums is not None
        ours = [
            (item.index.fqn, item.index.offset, {"file": self._file, "key": key, "crc32": attempt.checksums[key]})
            for item, (key, *_) in zip(self._plan.items, self._plan.entries, strict=True)
        ]
        found = collect_objects(self._mesh.world, ours)
        problem: CheckpointError | None = None
        if found is not None:
            assert self._plan.metadata is not None
            places = {(name, offset): place for rank in found for name, offset, place in rank if offset is not None}
            try:
                manifest.write(attempt.path, store.manifest_of(attempt.facts, self._plan.metadata, places))
            except CheckpointError as error:
                shutil.rmtree(attempt.path, ignore_errors=True)
                problem = error
        return broadcast_object(self._mesh.world, problem)

    def _failure(self, attempt: _Attempt) -> CheckpointError:
        """Remove what was written. Returns what went wrong on the lowest rank that failed."""
        found = gather_objects(self._mesh.world, attempt.error and (attempt.error.what, attempt.error.mend))
        if self._mesh.rank == 0:
            shutil.rmtree(attempt.path, ignore_errors=True)
        rank, (what, mend) = next((rank, error) for rank, error in enumerate(found) if error)
        return CheckpointError(f"rank {rank}: {what}", mend=mend)


def _made(path: Path) -> str:
    """Make a folder. Returns why it cannot be made, "" if it is."""
    try:
        path.mkdir(parents=True)
    except OSError as error:
        return error.strerror or str(error)
    return ""
