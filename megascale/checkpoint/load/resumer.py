"""Resuming: find the checkpoints that a run may resume from, and load the newest intact one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.checkpoint import folders
from megascale.checkpoint.collective_errors import on_first_rank
from megascale.checkpoint.format import manifest
from megascale.checkpoint.load.lost_stages import Shares, can_rebuild, lost_stages, rebuild_stages
from megascale.config.toml_writer import config_changes
from megascale.config.train import HF_PREFIX
from megascale.core.errors import CheckpointError
from megascale.core.limits import os_error_hint
from megascale.core.run_folder import check_known, saved_folder
from megascale.core.storage import Location

if TYPE_CHECKING:
    from megascale.checkpoint.format.state import Progress
    from megascale.checkpoint.load.state_loader import StateLoader
    from megascale.checkpoint.save.saver import CheckpointSaver
    from megascale.comm.mesh import Mesh


@dataclass(frozen=True)
class ResumeResult:
    """The checkpoint resumed from; `path` is None for in-memory copies. `config`: the saved run's configuration;
    `changes`: keys of it that differ. `bytes`: bytes read from storage by all ranks. `rebuilt`: stages whose state was
    lost, with the shares of their neighbours in the new one.
    """

    progress: Progress
    path: Location | None
    config: Mapping[str, Any]
    changes: list[str]
    bytes: int
    rebuilt: Shares = field(default_factory=dict)


@dataclass
class Resumer:
    """Loads the newest intact checkpoint, from memory or from storage; all ranks call `resume` together.

    `source`: `checkpoint.resume`. `rebuild_stage`: as in `[fault]`. `config`: the run's, in JSON. `run`: the run's
    folder; `folder`: of its checkpoints. `warnings`: checkpoints passed over, and why. `damaged`: the damaged ones,
    with their error.
    """

    source: str
    rebuild_stage: int
    config: Mapping[str, Any]
    run: Path
    folder: Location
    loader: StateLoader
    saver: CheckpointSaver | None
    mesh: Mesh
    warnings: list[str] = field(default_factory=list)
    damaged: dict[Location, str] = field(default_factory=dict)

    def resume(self) -> ResumeResult | None:
        """Load the newest intact checkpoint; None if there is none to resume from.

        Candidates are the run's own checkpoints, and in-memory copies that are not older. A run without its own loads
        what `checkpoint.resume` names. Before it goes back by `rebuild_stage` steps, it rebuilds lost stages.

        Raises: CheckpointError if it holds another model, DamagedError if all are damaged
        """
        stored, self.warnings = on_first_rank(self.mesh.world, self._find, "the checkpoints to resume from")
        for step, url in stored:
            if result := self._load_from_memory(step) or self._load_if_intact(Location(url, self.folder.retry_s)):
                return result
        if result := self._load_from_memory(0):
            return result
        if self.damaged:
            what = "no checkpoint is intact: " + "; ".join(self.damaged.values())
            raise manifest.DamagedError(what, hint="restore one, or start afresh under another name")
        if not stored and self.source != "never":
            on_first_rank(self.mesh.world, self._check_not_lost, "a start from scratch")
        return None

    def _load_from_memory(self, min_step: int) -> ResumeResult | None:
        if self.saver is None or self.source == "never":
            return None
        topology, placement = self.mesh.topology, self.mesh.placement

        def can_lose(step: int, ranks: frozenset[int]) -> bool:
            recent = 0 < self.rebuild_stage <= step - min_step
            return not ranks or (recent and can_rebuild(lost_stages(ranks, topology, placement), placement))

        facts, ranks, problems = self.saver.load_from_memory(min_step, can_lose)
        self.warnings += [problem for problem in problems if problem not in self.warnings]
        if facts is None:
            return None
        self.loader.check_same_model("the copy in memory", facts.config.get("model", {}))
        lost = lost_stages(ranks, topology, placement)
        rebuilt = rebuild_stages(lost, self.loader.model, self.loader.parts, self.mesh) if lost else {}
        self.loader.end_restore()
        changes = config_changes(facts.config, self.config)
        return ResumeResult(facts.progress, None, facts.config, changes, 0, rebuilt)

    def _load_if_intact(self, path: Location) -> ResumeResult | None:
        """Load a checkpoint; None, with a warning, if it is damaged."""
        try:
            saved, bytes_read = self.loader.load(path)
        except manifest.DamagedError as error:
            self.warnings.append(error.message)
            self.damaged[path] = error.message
            return None
        if warning := folders.name_warning(path, saved.facts.progress.step):
            self.warnings.append(warning)
        config = saved.facts.config
        return ResumeResult(saved.facts.progress, path, config, config_changes(config, self.config), bytes_read)

    def _find(self) -> tuple[list[tuple[int, str]], list[str]]:
        """Return the steps and folders to try, newest first, and warnings: the run's own checkpoints, or else those
        that `checkpoint.resume` names. Unfinished attempts are removed. Raises: CheckpointError
        """
        check_known(self.run)
        source, complete = self.source, folders.complete_checkpoints(self.folder)
        if source == "never" and complete:  # `keep` would take their later steps for the newest
            what = f"{complete[-1].path} is there, and checkpoint.resume is never"
            raise CheckpointError(what, hint="another name or checkpoint.dir, or checkpoint.resume=auto")
        if source != "never" and not complete and (last := saved_folder(self.run)) is not None:
            return [], [f"{last} has no checkpoint of the run any more"]  # nothing is touched
        problems = folders.remove_unfinished(self.folder)
        if complete and (last := saved_folder(self.run)) not in (None, str(self.folder)):
            problems.append(f"the run saved last in {last}, and resumes from {complete[-1].path}")
        if complete and source != (newest := complete[-1].path).url and _folder_of(source) == _folder_of(newest.url):
            hint = f"to go back, give another name, or move {newest.name} and other newer ones away"
            problems.append(f"checkpoint.resume = {source} is not read, as the run has a newer checkpoint: {hint}")
        if self.saver and not self.folder.local_path:  # a local folder was locked, and so written to, before
            try:
                self.folder.check_writable()
            except OSError as error:
                hint = os_error_hint(error, "checkpoint.dir, permissions, the network")
                raise CheckpointError(f"cannot write to {self.folder}: {error.strerror}", hint=hint) from None
        if complete or source in ("auto", "never") or source.startswith(HF_PREFIX):
            return [(stored.step, stored.path.url) for stored in reversed(complete)], problems
        return [(0, path.url) for path in folders.find_checkpoints(Location(source, self.folder.retry_s))], problems

    def _check_not_lost(self) -> None:
        """Raise CheckpointError if the run has saved before and no checkpoint is there."""
        if (folder := saved_folder(self.run)) is not None:
            what = f"the run has had checkpoints in {folder}, and {self.folder} has no complete one"
            raise CheckpointError(what, hint="mount or restore it, or start afresh under another name")


def _folder_of(path: str) -> Path:
    return Path(path).absolute().parent
