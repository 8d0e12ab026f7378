"""Saving a run and resuming it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megascale.checkpoint import manifest, store
from megascale.checkpoint.plan import LoadPlanner
from megascale.checkpoint.saving import Saved, Saving
from megascale.checkpoint.state import WEIGHTS, GlobalTensor, Part, Progress, global_tensors, history_tensors
from megascale.comm.collectives import broadcast_object
from megascale.comm.mesh import Mesh
from megascale.config.resolved import changes
from megascale.config.run import FOREIGN, RunConfig
from megascale.core.errors import CheckpointError
from megascale.device import Device
from megascale.parallel.eight_bit import Scaling
from megascale.parallel.shards import ShardState

COMPARED = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size", "norm", "activation",
            "position", "bias", "tie_embeddings", "block")  # fmt: skip
"""Keys of `[model]` that a checkpoint must share with the run that resumes from it."""


@dataclass(frozen=True)
class Resumed:
    """What was resumed from; `changes`: what the configuration says otherwise than the one that was saved."""

    progress: Progress
    path: Path
    changes: list[str]


class Checkpoints:
    """The checkpoints of one run. Every rank calls `save` and `resume` together."""

    def __init__(
        self, config: RunConfig, mesh: Mesh, shards: Sequence[ShardState], scaling: Scaling, device: Device
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._shards = shards
        self._scaling = scaling
        self.saving: Saving | None = None
        if config.checkpoint.every:
            held = [tensor for shard in shards for tensor in (shard.master, *shard.state.values())]
            state = global_tensors(shards, mesh) | history_tensors(scaling)
            self.saving = Saving(state, [*held, scaling.history], mesh, device)
        self.folder = config.folder / "checkpoints"
        self._saved_step: int | None = None

    def begin(self, progress: Progress) -> Saved | None:
        """Begin to write a checkpoint, unless this step is on disk already. What became of the one before, if it was
        still being written: that is waited for.

        Raises: CheckpointError on every rank if its folder cannot be made
        """
        assert self.saving is not None, "checkpoint.every = 0 saves nothing"
        before = self.finish()
        if self._saved_step == progress.step:
            return before
        first = self._mesh.rank == 0
        path = broadcast_object(self._mesh.world, store.fresh_folder(self.folder, progress.step) if first else None)
        assert path is not None, "rank 0 names the folder"
        config = self._config.model_dump(by_alias=True, mode="json")
        self.saving.begin(path, manifest.Facts.of(progress, config, asdict(self._mesh.topology)))
        return before

    def poll(self) -> tuple[float, float]:
        """Of this rank: 1 if it has written its part of the checkpoint under way, and 1 if it has failed to; else 0."""
        return self.saving.poll() if self.saving else (0.0, 0.0)

    def settle(self, written: float, failed: float) -> Saved | None:
        """What became of the checkpoint under way, by the sums over all ranks of what `poll` says; None while it
        is being written.
        """
        return self._noted(self.saving.settle(written, failed)) if self.saving else None

    def finish(self) -> Saved | None:
        """Wait for the checkpoint under way. What became of it; None without one."""
        return self._noted(self.saving.finish()) if self.saving else None

    def save(self, progress: Progress) -> Saved | None:
        """Write a checkpoint, and wait for it; None if this step is on disk already.

        Raises: CheckpointError on every rank if any could not write; nothing of the attempt is left
        """
        self.begin(progress)
        saved = self.finish()
        if saved is not None and saved.error is not None:
            raise saved.error
        return saved

    def _noted(self, saved: Saved | None) -> Saved | None:
        if saved is not None and saved.error is None:
            self._saved_step = saved.step
        return saved

    def remove_old(self) -> None:
        """On rank 0, delete what neither `checkpoint.keep` nor `keep_every` keeps.

        Raises: CheckpointError
        """
        if self._mesh.rank == 0:
            store.keep_newest(self.folder, self._config.checkpoint.keep, self._config.checkpoint.keep_every)

    def resume(self) -> Resumed | None:
        """Load what `checkpoint.resume` asks for into the shards; None if there is nothing to resume from.

        Raises: CheckpointError for a checkpoint that cannot be trusted or is of another model.
        """
        path = broadcast_object(self._mesh.world, self._find() if self._mesh.rank == 0 else None)
        if path is None:
            return None
        saved = manifest.read(path)
        self._compare(path, saved.facts.config.get("model", {}))
        reader = store.Reader(path, saved.tensors)
        try:
            dcp.load(self._wanted(saved), storage_reader=reader, planner=LoadPlanner())
        except CheckpointException as error:
            raise _first_failure(error) from None
        progress = saved.facts.progress
        self._saved_step = progress.step if path.parent.absolute() == self.folder.absolute() else None
        return Resumed(progress, path, changes(saved.facts.config, self._config))

    def start_from(self, name: str, model: Mapping[str, Any], read: Callable[[str, Part], Tensor]) -> list[str]:
        """Begin the run with another project's weights: `read` gives a part of a tensor of `model`, in any format.
        Returns what the configuration says otherwise than `model`.

        Raises: CheckpointError if it is of another model
        """
        self._compare(name, model)
        for tensor, found in global_tensors(self._shards, self._mesh).items():
            if tensor.startswith(WEIGHTS):
                for piece in found.pieces:
                    piece.data.copy_(read(tensor.removeprefix(WEIGHTS), (piece.offset, piece.size)))
        return changes({"model": model}, self._config)

    def _wanted(self, saved: manifest.Manifest) -> dict[str, GlobalTensor]:
        """What of this run's state to load: of a checkpoint that is of weights alone nothing else."""
        ours = global_tensors(self._shards, self._mesh)
        if saved.facts.progress.step == 0 and all(name.startswith(WEIGHTS) for name in saved.tensors):
            return {name: tensor for name, tensor in ours.items() if name.startswith(WEIGHTS)}
        return ours | self._history(saved.tensors)

    def _history(self, saved: Mapping[str, manifest.Tensor]) -> dict[str, GlobalTensor]:
        """The history of 8-bit scales where the checkpoint has all of it. Else the run begins one anew."""
        wanted = history_tensors(self._scaling)
        there = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        self._scaling.known = bool(wanted) and all(there.get(name) == t.shape for name, t in wanted.items())
        return wanted if self._scaling.known else {}

    def _find(self) -> Path | None:
        """The run's own newest checkpoint; without one, the one that the configuration names."""
        asked = self._config.checkpoint.resume
        store.remove_unfinished(self.folder)
        if asked != "never" and (found := store.complete(self.folder)):
            return found[-1].path
        return None if asked in ("auto", "never") or asked.startswith(FOREIGN) else Path(asked)

    def _compare(self, path: Path | str, saved: Mapping[str, Any]) -> None:
        ours = self._config.model.model_dump()
        different = [
            f"{key} {saved.get(key)} there, {ours[key]} here" for key in COMPARED if saved.get(key) != ours[key]
        ]
        if different:
            raise CheckpointError(
                f"{path} is of another model: {'; '.join(different)}", mend="another name for this run"
            )


def _first_failure(error: CheckpointException) -> CheckpointError:
    """What went wrong on the lowest rank that failed."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, CheckpointError):
        return CheckpointError(f"rank {rank}: {cause.what}", mend=cause.mend)
    return CheckpointError(f"rank {rank}: {type(cause).__name__}: {cause}")
