"""The checkpoints of a run: save, resume and prune, as training calls them."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.checkpoint.collective_errors import on_first_rank
from megascale.checkpoint.folders import Pruner
from megascale.checkpoint.format import manifest
from megascale.checkpoint.load.resumer import Resumer, ResumeResult
from megascale.checkpoint.load.state_loader import StateLoader
from megascale.checkpoint.save.saver import CheckpointSaver, SaveResult
from megascale.config.toml_writer import config_changes
from megascale.core.files import exists
from megascale.core.run_folder import TOKEN, copies_folder, read_token, write_saved_marker, write_token
from megascale.core.storage import Location

if TYPE_CHECKING:
    from torch import Tensor

    from megascale.checkpoint.format.state import Progress, Region
    from megascale.checkpoint.memory.memory_checkpoints import MemoryCheckpoints
    from megascale.comm.mesh import Mesh
    from megascale.config.model import ModelConfig
    from megascale.config.train import CheckpointConfig
    from megascale.device import Device
    from megascale.parallel.stateful import Stateful


class Checkpoints:
    """The checkpoints of one run with the state of its `parts`. All ranks call all methods but `poll_save` together.

    `config`: the run's configuration, as `RunConfig.model_dump(by_alias=True, mode="json")`. `run`: the run's folder;
    `location`: of its checkpoints, a path or a URL.

    `resumed_from_memory`: True if the state came from in-memory copies, so that storage may not have it.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        model: ModelConfig,
        config: dict[str, Any],
        run: Path,
        location: str,
        mesh: Mesh,
        parts: Sequence[Stateful],
        device: Device,
    ) -> None:
        self._settings = settings
        self._config = config
        self._run = run
        self._mesh = mesh
        self._memory_checkpoints: MemoryCheckpoints | None = None
        if settings.every and settings.in_memory_every:
            from megascale.checkpoint.memory.memory_checkpoints import MemoryCheckpoints
            from megascale.operate.channel.secret import job_secret

            secret = job_secret(run.parent) if mesh.world.size > 1 else b""
            memory = Path(settings.in_memory_dir)
            self._memory_checkpoints = MemoryCheckpoints(memory, run, settings.replicate, mesh, secret)
        self.saver: CheckpointSaver | None = None
        if settings.every:
            rule = config["optimizer"]
            # what tells states of equal names and shapes apart: update rules and the kind of average
            meaning = json.dumps([rule["name"], rule["options"], rule["groups"], config["train"]["weight_average"]])
            self.saver = CheckpointSaver(
                {name: tensor for part in parts for name, tensor in part.global_tensors().items()},
                [tensor for part in parts for tensor in part.flat_tensors()],
                settings.max_file_bytes,
                self._memory_checkpoints,
                run,
                meaning,
                mesh,
                device,
            )
        self.folder = Location(location, settings.retry_timeout_s)
        self._loader = StateLoader(model, parts, mesh, device)
        rebuild = config["fault"]["rebuild_stage"]
        self._resumer = Resumer(settings.resume, rebuild, config, run, self.folder, self._loader, self.saver, mesh)
        self._pruner = Pruner(self.folder, settings.keep, settings.keep_every)
        self._saved_step: int | None = None
        self._waited_s = 0.0
        self.resumed_from_memory = False

    @property
    def warnings(self) -> list[str]:
        """Warnings of `resume`, a line each: checkpoints that it passed over, and why."""
        return self._resumer.warnings

    @property
    def newest_step(self) -> int | None:
        """The step of this run's newest checkpoint on storage, or of the save in progress there; None if this process
        neither resumed from one nor began to save one.
        """
        in_progress = self.saver.step_in_progress if self.saver else None
        return self._saved_step if in_progress is None else in_progress

    def save(self, progress: Progress) -> SaveResult | None:
        """Write a checkpoint and wait for it; None if this step is on storage. No save may be in progress.

        Raises: CheckpointError on every rank if a rank could not write; all files of the attempt are removed
        """
        self.start_save(progress)
        saved, self._waited_s = self.wait_for_save(), 0.0  # the next save will not have waited for this one
        if saved is not None and saved.error is not None:
            raise saved.error
        return saved

    def start_save(self, progress: Progress) -> None:
        """Start to write a checkpoint, unless this step is on storage. No save may be in progress.

        Raises: CheckpointError on every rank if its folder cannot be made
        """
        assert self.saver is not None, "checkpoint.every = 0 saves nothing"
        waited_s, self._waited_s = self._waited_s, 0.0
        if self._saved_step != progress.step:
            with self._mesh.timeout.extended():  # all ranks wait for the slowest storage
                self.saver.start(self.folder, self._facts(progress), waited_s)

    def save_to_memory(self, progress: Progress) -> None:
        """Start an in-memory copy, unless a save is in progress."""
        assert self.saver is not None, "checkpoint.every = 0 saves nothing"
        if not self.saver.in_progress:
            self.saver.start(None, self._facts(progress))

    def poll_save(self) -> tuple[float, float]:
        """Return this rank's (written, failed) of the save in progress: 1.0 or 0.0, for a sum over ranks."""
        return self.saver.poll() if self.saver else (0.0, 0.0)

    def complete_save(self, written: float, failed: float) -> SaveResult | None:
        """Complete the save once all ranks are done, by the sums of `poll_save` over ranks; None before."""
        if not self.saver or not written + failed:
            return None
        with self._mesh.timeout.extended():
            return self._record_save(self.saver.complete(written, failed))

    def wait_for_save(self) -> SaveResult | None:
        """Wait for the save in progress; None without one."""
        start = time.monotonic()
        with self._mesh.timeout.extended():
            saved = self._record_save(self.saver.wait()) if self.saver else None
        self._waited_s = time.monotonic() - start
        return saved

    def drop_memory_copies(self) -> None:
        """Remove the in-memory copies: the run is over, and its last checkpoint on storage."""
        if self._memory_checkpoints:
            self._memory_checkpoints.remove_copies()

    def prune(self) -> None:
        """Start to delete, on rank 0, checkpoints outside `checkpoint.keep` and `keep_every`.

        Raises: CheckpointError if the deletion before failed
        """
        if self._mesh.rank == 0:
            self._pruner.start(excluded=self._resumer.damaged)

    def wait_for_prune(self) -> None:
        """Wait for the deletion in progress. Raises: CheckpointError if it failed"""
        self._pruner.wait()

    def resume(self) -> ResumeResult | None:
        """Load the newest intact checkpoint into the shards (`Resumer.resume`); None if there is none.

        Raises: CheckpointError if it holds another model, or all are damaged
        """
        result = self._resumer.resume()
        self.resumed_from_memory = result is not None and result.path is None
        if result and result.path and result.path.url.startswith(f"{self.folder}/"):
            self._mark_saved(result.progress.step)
        if not self._settings.in_memory_every:
            _invalidate_copies(Path(self._settings.in_memory_dir), self._run.resolve(), self._mesh)
        if self._memory_checkpoints:
            step = result.progress.step if result and self.resumed_from_memory else None
            self.warnings.extend(self._memory_checkpoints.keep_only_step(step))
            if self._memory_checkpoints.unreplicated_ranks:
                count = f"{self._memory_checkpoints.unreplicated_ranks} of {self._mesh.world.size} ranks"
                self.warnings.append(f"no second copies in memory of {count}: the job has no other host")
        if self.saver and self._saved_step is not None:  # an intact checkpoint is there: free space for the next save
            self.prune()
        return result

    def load_weights(self, name: str, model: Mapping[str, Any], read: Callable[[str, Region], Tensor]) -> list[str]:
        """Start the run from another project's weights: `read` returns a region of a tensor of `model`, in any dtype.

        Returns the keys of `[model]` that differ. Raises: CheckpointError if `model`, from `name`, is another model
        """
        self._loader.load_weights(name, model, read)
        return config_changes({"model": model}, self._config)

    def _facts(self, progress: Progress) -> manifest.Facts:
        topology = self._mesh.topology
        layout = topology.sizes | ({"ep": topology.ep} if topology.ep > 1 else {})
        return manifest.Facts.for_run(progress, self._config, layout)

    def _record_save(self, saved: SaveResult | None) -> SaveResult | None:
        if saved is not None and saved.path is not None and saved.error is None:
            self._mark_saved(saved.step)
        return saved

    def _mark_saved(self, step: int) -> None:
        if self._saved_step is None and self._mesh.rank == 0:
            write_saved_marker(self._run, str(self.folder))
        self._saved_step = step


def _invalidate_copies(parent: Path, run: Path, mesh: Mesh) -> None:
    """Invalidate and remove all copies of a run: a start without in-memory checkpoints may go back to earlier steps.

    Raises: CheckpointError on every rank if the run's folder cannot be written
    """

    def invalidate() -> str:
        if not exists(run / TOKEN):
            return ""
        run_id, _ = read_token(run)
        write_token(run, run_id, uuid.uuid4().hex)
        return run_id

    if run_id := on_first_rank(mesh.world, invalidate, "copies to invalidate"):
        from megascale.operate.node.stored_copies import remove_copies

        remove_copies(copies_folder(parent, run_id, run / TOKEN))
