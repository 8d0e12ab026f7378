"""Saving a run and resuming it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlan

from megascale.checkpoint import manifest, store, whole
from megascale.checkpoint.memory import Memory, discard
from megascale.checkpoint.plan import LoadPlanner
from megascale.checkpoint.reader import Reader
from megascale.checkpoint.saving import Saved, Saving
from megascale.checkpoint.state import WEIGHTS, GlobalTensor, Part, Progress, global_tensors, history_tensors
from megascale.checkpoint.storage import Location
from megascale.checkpoint.together import by_all, by_first
from megascale.comm.collectives import all_gather
from megascale.comm.mesh import Mesh
from megascale.comm.totals import spread, sum_over_job
from megascale.config.resolved import changes
from megascale.config.run import FOREIGN, RunConfig
from megascale.core.errors import CheckpointError
from megascale.core.files import write_text
from megascale.device import Device
from megascale.parallel.eight_bit import Scaling
from megascale.parallel.shards import ShardState

COMPARED = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size", "norm", "activation",
            "position", "bias", "tie_embeddings", "block")  # fmt: skip
"""Keys of `[model]` that a checkpoint must share with the run that resumes from it."""

SAVED = ".saved"
"""File of a run's folder: the folder of its checkpoints, once there was one. If none is there any more the storage is
missing, and the run must not begin anew unasked.
"""


@dataclass(frozen=True)
class Resumed:
    """What was resumed from; `path`: None for copies in memory; `changes`: what the configuration says otherwise than
    the one that was saved; `bytes`: how many all ranks have read of storage.
    """

    progress: Progress
    path: Location | None
    changes: list[str]
    bytes: int


class Checkpoints:
    """The checkpoints of one run. Every rank calls `save` and `resume` together. `warnings`: what `resume` passed over,
    and why.
    """

    def __init__(
        self, config: RunConfig, mesh: Mesh, shards: Sequence[ShardState], scaling: Scaling, device: Device
    ) -> None:
        self._config = config
        self._device = device
        self._said = config.model_dump(by_alias=True, mode="json")
        self._mesh = mesh
        self._shards = shards
        self._scaling = scaling
        self.saving: Saving | None = None
        self._memory: Memory | None = None
        wanted = config.checkpoint
        if wanted.every:
            held = [tensor for shard in shards for tensor in (shard.master, *shard.state.values())]
            state = global_tensors(shards, mesh) | history_tensors(scaling)
            if wanted.memory_every:
                self._memory = Memory(Path(wanted.memory_dir), config.folder, wanted.replicate, mesh)
            self.saving = Saving(state, [*held, scaling.history], wanted.file_bytes, self._memory, mesh, device)
        self.folder = Location(config.checkpoints, wanted.patience_s)
        self.warnings: list[str] = []
        self._saved_step: int | None = None
        self._waited = 0.0
        self._damaged: dict[Location, str] = {}
        self._remover = ThreadPoolExecutor(1, "remover")
        self._removal: Future[None] | None = None
        self.in_memory = False  # whether what was resumed came from memory, and is on storage perhaps not or not whole

    def begin(self, progress: Progress) -> None:
        """Begin to write a checkpoint, unless this step is on disk already. None may be under way (`finish`).

        Raises: CheckpointError on every rank if its folder cannot be made
        """
        assert self.saving is not None, "checkpoint.every = 0 saves nothing"
        waited, self._waited = self._waited, 0.0
        if self._saved_step != progress.step:
            with self._mesh.timeout.patiently():  # storage may be slow for one rank, and the others wait for it
                self.saving.begin(self.folder, self._facts(progress), waited)

    def remember(self, progress: Progress) -> None:
        """Begin a copy that stays in memory, unless one is under way."""
        assert self.saving is not None, "checkpoint.every = 0 saves nothing"
        if not self.saving.busy:
            self.saving.begin(None, self._facts(progress))

    def forget(self) -> None:
        """The run is over, and its last checkpoint on storage: leave nothing in memory."""
        if self._memory:
            self._memory.remove()

    def _facts(self, progress: Progress) -> manifest.Facts:
        return manifest.Facts.of(progress, self._said, asdict(self._mesh.topology))

    def poll(self) -> tuple[float, float]:
        """Of this rank: 1 if it has written its part of the checkpoint under way, and 1 if it has failed to; else 0."""
        return self.saving.poll() if self.saving else (0.0, 0.0)

    def settle(self, written: float, failed: float) -> Saved | None:
        """What became of the checkpoint under way, by the sums over all ranks of what `poll` says; None while it
        is being written.
        """
        if not self.saving or not written + failed:
            return None
        with self._mesh.timeout.patiently():
            return self._noted(self.saving.settle(written, failed))

    def finish(self) -> Saved | None:
        """Wait for the checkpoint under way. What became of it; None without one."""
        start = time.monotonic()
        with self._mesh.timeout.patiently():
            found = self._noted(self.saving.finish()) if self.saving else None
        self._waited = time.monotonic() - start
        return found

    def save(self, progress: Progress) -> Saved | None:
        """Write a checkpoint, and wait for it; None if this step is on disk already. None may be under way.

        Raises: CheckpointError on every rank if any could not write; nothing of the attempt is left
        """
        self.begin(progress)
        saved, self._waited = self.finish(), 0.0  # not for one before
        if saved is not None and saved.error is not None:
            raise saved.error
        return saved

    def _noted(self, saved: Saved | None) -> Saved | None:
        if saved is not None and saved.path is not None and saved.error is None:
            self._own(saved.step)
        return saved

    def _own(self, step: int) -> None:
        """A right checkpoint of the run's own is there. Its folder says so, for when it is there no more."""
        if self._saved_step is None and self._mesh.rank == 0:
            with contextlib.suppress(OSError):  # the checkpoint is there; who misses it is warned by this alone
                self._config.folder.mkdir(parents=True, exist_ok=True)
                write_text(self._config.folder / SAVED, f"{self.folder}\n")
        self._saved_step = step

    def remove_old(self) -> None:
        """On rank 0, begin to delete what neither `checkpoint.keep` nor `keep_every` keeps, once what was begun before
        is done: on a thread, for a checkpoint may have thousands of files.

        Raises: CheckpointError if that could not be done
        """
        if self._mesh.rank:
            return
        wanted = self._config.checkpoint
        try:
            self.removed()
        finally:
            self._removal = self._remover.submit(
                store.keep_newest, self.folder, wanted.keep, wanted.keep_every, besides=list(self._damaged)
            )

    def removed(self) -> None:
        """Wait for what is being deleted.

        Raises: CheckpointError if it could not be
        """
        removal, self._removal = self._removal, None
        if removal is not None:
            removal.result()

    def resume(self) -> Resumed | None:
        """Load what `checkpoint.resume` asks for into the shards; None if there is nothing to resume from. Of the run's
        own checkpoints, and copies in memory that are not older, the newest that is what was written.

        Raises: CheckpointError for one that is of another model, or if none can be trusted.
        """
        wanted = self._config.checkpoint
        stored, self.warnings = self._found()
        found: Resumed | None = None
        for step, path in stored:
            found = self._recalled(step) or self._resumed(path)
            if found:
                break
        else:
            found = self._recalled(0)
        if found is None and self._damaged:
            what = "no checkpoint is right: " + "; ".join(self._damaged.values())
            raise manifest.DamagedError(what, mend="restore one, or begin anew under another name")
        if not wanted.memory_every:
            discard(Path(wanted.memory_dir), self._config.folder, self._mesh)
        if self._memory:
            self._memory.keep_only(found.progress.step if found and found.path is None else None)
            if self._memory.lonely:
                count = f"{self._memory.lonely} of {self._mesh.world.size} ranks"
                self.warnings.append(f"no second copies in memory of {count}: data parallelism has no other host")
        if self.saving and self._saved_step is not None:  # which is right, so that older ones may go, and make room
            self.remove_old()
        return found

    def _recalled(self, since: int) -> Resumed | None:
        """Take up copies in memory of a step that is not before `since`."""
        if self.saving is None or self._config.checkpoint.resume == "never":
            return None
        facts, problems = self.saving.recall(since)
        self.warnings += [problem for problem in problems if problem not in self.warnings]
        if facts is None:
            return None
        self._compare("the copy in memory", facts.config.get("model", {}))
        self._scaling.known = bool(history_tensors(self._scaling))
        self.in_memory = True
        return Resumed(facts.progress, None, changes(facts.config, self._config), 0)

    def _resumed(self, path: Location) -> Resumed | None:
        """Load a checkpoint; None if it is not what was written."""
        try:
            saved, count = self._load(path)
        except manifest.DamagedError as error:
            self.warnings.append(error.what)
            self._damaged[path] = error.what
            return None
        progress = saved.facts.progress
        if path.url.startswith(f"{self.folder}/"):
            self._own(progress.step)
        return Resumed(progress, path, changes(saved.facts.config, self._config), count)

    def _load(self, path: Location) -> tuple[manifest.Manifest, int]:
        """Load a checkpoint. Returns its manifest, and how many bytes were read of its files.

        Raises: on every rank the same DamagedError if it is not what was written, CheckpointError if it is of another
        model
        """
        saved = self._manifest(path)
        self._compare(path, saved.facts.config.get("model", {}))
        reader = Reader(path, saved, self._mesh.tp, self._device.torch)
        wanted, planner = self._wanted(saved), LoadPlanner(path)

        def plan() -> LoadPlan:
            metadata = reader.read_metadata()
            planner.set_up_planner(wanted, metadata)
            reader.set_up_storage_reader(metadata, is_coordinator=False)
            return planner.create_local_plan()

        planned = by_all(self._mesh.world, plan, f"the plan of {path}")
        by_all(self._mesh.world, lambda: reader.read_data(planned, planner), f"reading {path}")
        self._share()
        return saved, sum(self._mesh.world.control.gather(reader.bytes, f"bytes of {path}"))

    def _manifest(self, path: Location) -> manifest.Manifest:
        """A checkpoint's manifest, which the first rank reads."""
        text: list[bytes] = []
        by_first(self._mesh.world, lambda: text.append(manifest.text_of(path)), f"the manifest of {path}")
        return manifest.parse(path, spread(self._mesh, b"".join(text), self._device.torch))

    def _share(self) -> None:
        """Give the others what one rank has read: within data parallelism the shares of state that all of it holds, and
        of the history of 8-bit scales, which the first rank reads, all.
        """
        for shard in self._shards:
            if not shard.bucket.zero:
                share = slice(*shard.bucket.layout.shard(shard.bucket.group.index))
                for flat in (shard.master, *shard.state.values()):
                    all_gather(shard.bucket.group, flat, flat[share])
        if self._scaling.known:
            sum_over_job(self._mesh, self._scaling.history)

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
        self._share()
        return changes({"model": model}, self._config)

    def _wanted(self, saved: manifest.Manifest) -> dict[str, GlobalTensor]:
        """What of this run's state this rank reads: of a checkpoint that is of weights alone nothing else."""
        ours = global_tensors(self._shards, self._mesh)
        if saved.facts.progress.step == 0 and all(name.startswith(WEIGHTS) for name in saved.tensors):
            return {name: tensor for name, tensor in ours.items() if name.startswith(WEIGHTS)}
        return ours | self._history(saved.tensors)

    def _history(self, saved: Mapping[str, manifest.Tensor]) -> dict[str, GlobalTensor]:
        """On the first rank the history of 8-bit scales, where the checkpoint has all of it. Else the run begins one
        anew.
        """
        wanted = history_tensors(self._scaling)
        there = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        self._scaling.known = bool(wanted) and all(there.get(name) == t.shape for name, t in wanted.items())
        self._scaling.history.zero_()
        return wanted if self._scaling.known and self._mesh.rank == 0 else {}

    def _found(self) -> tuple[list[tuple[int, Location]], list[str]]:
        """What the first rank finds, on every rank.

        Raises: CheckpointError on every rank
        """
        found, problems = by_first(self._mesh.world, self._find, "the checkpoints that are there")
        return [(step, Location(url, self.folder.patience)) for step, url in found], problems

    def _find(self) -> tuple[list[tuple[int, str]], list[str]]:
        """The run's own complete checkpoints, the newest first, with their steps; without one, that which the
        configuration names. And what could not be deleted of those that did not finish.
        """
        asked, own = self._config.checkpoint.resume, store.complete(self.folder)
        other = asked not in ("auto", "never") and not asked.startswith(FOREIGN)
        if asked == "never" and own:  # whose later steps `keep` would take for the newest
            what = f"{own[-1].path} is there, and checkpoint.resume is never"
            raise CheckpointError(what, mend="another name or checkpoint.dir, or checkpoint.resume=auto")
        if asked != "never" and not own:
            self._check_saved()
        problems = store.remove_unfinished(self.folder)
        if self.saving and not self.folder.local:  # what is local was claimed before
            self._probe()
        if own or not other:
            return [(stored.step, stored.path.url) for stored in reversed(own)], problems
        return [(0, path.url) for path in whole.find_all(Location(asked, self.folder.patience))], problems

    def _check_saved(self) -> None:
        """Raises: CheckpointError if the run has had checkpoints, of which none is there."""
        try:
            folder = (self._config.folder / SAVED).read_text(encoding="utf-8").strip()
        except OSError:
            return
        what = f"the run has had checkpoints in {folder}, and {self.folder} has no complete one"
        raise CheckpointError(what, mend="mount or restore it, or begin anew under another name")

    def _probe(self) -> None:
        try:
            self.folder.probe()
        except OSError as error:
            what = f"cannot write to {self.folder}: {error.strerror}"
            raise CheckpointError(what, mend="checkpoint.dir, who may write there, the network") from None

    def _compare(self, path: Location | str, saved: Mapping[str, Any]) -> None:
        ours = self._config.model.model_dump()
        different = [
            f"{key} {saved.get(key)} there, {ours[key]} here" for key in COMPARED if saved.get(key) != ours[key]
        ]
        if different:
            raise CheckpointError(
                f"{path} is of another model: {'; '.join(different)}", mend="another name for this run"
            )
