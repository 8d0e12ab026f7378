"""The model of the weights that a run would begin with or resume from, compared with `[model]` before the start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megascale.config.model import SAME_MODEL_HINT, model_differences
from megascale.config.renamed import with_present_names
from megascale.config.run import RunConfig
from megascale.config.toml_writer import config_changes
from megascale.config.train import HF_PREFIX
from megascale.convert.config_file import check_small_files, read_model_config
from megascale.core.errors import CheckpointError, ConfigError, Problem
from megascale.core.files import absolute_path, is_file


def compare_initial_model(config: RunConfig) -> list[str]:
    """Compare `[model]` with that of the run's newest checkpoint, or else of `checkpoint.resume`, on local storage.

    Returns that `checkpoint.resume` is not read where the run has a checkpoint of its own, and changes with which
    training starts, such as another rope_theta. A checkpoint that cannot be read is left to training, which may pass it
    over.
    Raises: ConfigError for another model, and for foreign weights of an unsupported one
    """
    resume = config.checkpoint.resume
    if resume == "never":
        return []
    newest = place = next(_newest_checkpoints(Path(config.checkpoint_folder)), None)
    saved: dict[str, Any] | None
    if newest is None and resume.startswith(HF_PREFIX):
        place = absolute_path(resume.removeprefix(HF_PREFIX))
        try:
            theirs = read_model_config(place)[1]
            if theirs.mtp_layers and config.model.mtp_layers:  # the files may lack the layers
                from megascale.convert.huggingface import PretrainedWeights

                theirs = PretrainedWeights(place).model
            kept = {"mtp_layers": min(theirs.mtp_layers, config.model.mtp_layers)}  # a run may leave the others out
            saved = {"model": theirs.model_dump(mode="json", by_alias=True, exclude={"preset"}) | kept}
            check_small_files(place)
        except CheckpointError as error:
            raise ConfigError([Problem("checkpoint.resume", "", error.message, error.hint)]) from None
    else:
        if newest is None and resume != "auto":
            place = next(_newest_checkpoints(Path(resume)), None)
        saved = _saved_config(place) if place else None
    if not saved:
        return []
    if different := model_differences(saved["model"], config.model):
        message = f"{place} is of another model: {different}"
        raise ConfigError([Problem("checkpoint.resume", "", message, SAME_MODEL_HINT)])
    current = config.model_dump(by_alias=True, mode="json")
    unread = newest is not None and resume != "auto" and Path(resume) not in (newest, newest.parent, newest.parents[1])
    taken = [f"goes on from {newest}: checkpoint.resume = {resume} is not read  -> another name for the run"]
    return taken * unread + [f"differs from {place}: {text}" for text in config_changes(saved, current)]


def _newest_checkpoints(folder: Path) -> Iterator[Path]:
    """Folders of complete checkpoints, the newest first: `folder` itself, those of a run, and those in `folder`."""
    if is_file(folder / "manifest.json"):
        yield folder
    for parent in (folder / "checkpoints", folder):
        yield from (path.parent for path in sorted(parent.glob("step-*/manifest.json"), reverse=True))


def _saved_config(checkpoint: Path) -> dict[str, Any] | None:
    """The configuration in a manifest; None if it cannot be read."""
    try:
        text = (checkpoint / "manifest.json").read_text(encoding="utf-8")
        config = with_present_names(json.loads(text)["manifest"]["facts"]["config"])
        sections = {section: keys for section, keys in config.items() if isinstance(keys, dict)}
        return sections if "model" in sections else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
