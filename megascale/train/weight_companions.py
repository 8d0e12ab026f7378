"""Companions of a run: the files beside the weights that it began with, and the tokenizer of its training data."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path

from megascale.checkpoint import companions
from megascale.config.data import dataset_prefixes
from megascale.config.run import RunConfig
from megascale.config.train import HF_PREFIX
from megascale.core.errors import CheckpointError
from megascale.core.files import fingerprint, is_file, is_folder, why_unreadable
from megascale.core.storage import WRITE_HINT, Location
from megascale.data.read.indexed_dataset import TokenizerInfo, read_info


def keep_companions(config: RunConfig, resumed_from: Location | None) -> list[str]:
    """Write the run's folder of companions, which its checkpoints copy. Called on rank 0 before the first step.

    `resumed_from`: the checkpoint that the run continues, if any. Returns warnings.
    Raises: CheckpointError if the folder cannot be written, DataError for an unreadable description of a dataset
    """
    try:
        return _keep_companions(config, resumed_from)
    except OSError as error:
        what = f"the files beside the weights cannot be kept: {error.filename}: {error.strerror}"
        raise CheckpointError(what, hint=WRITE_HINT) from None


def _keep_companions(config: RunConfig, resumed_from: Location | None) -> list[str]:
    folder = config.folder / companions.FOLDER
    resume = config.checkpoint.resume
    if resumed_from is not None and not is_folder(folder):
        folder.mkdir(parents=True)
        companions.copy_companions(resumed_from, Location(str(folder)))
    elif resumed_from is None and resume.startswith(HF_PREFIX):
        _copy_foreign(Path(resume.removeprefix(HF_PREFIX)), folder)
    if not (info := training_tokenizer(config)):
        return []
    text = json.dumps(asdict(info), indent=1) + "\n"
    companions.write_companion(folder, companions.DATA_TOKENIZER, text.encode())
    return _keep_tokenizer(config, info, folder)


def training_tokenizer(config: RunConfig) -> TokenizerInfo | None:
    """The tokenizer of the training data; None for random tokens and for datasets of other tools."""
    infos = (read_info(prefix) for prefix in dataset_prefixes(config.data.train))
    return next((info.tokenizer for info in infos if info), None)


def _copy_foreign(source: Path, folder: Path) -> None:
    for name in companions.COMPANIONS:
        if is_file(source / name):
            companions.write_companion(folder, name, (source / name).read_bytes())
    companions.write_companion(folder, companions.SOURCE_CONFIG, (source / "config.json").read_bytes())


def _keep_tokenizer(config: RunConfig, info: TokenizerInfo, folder: Path) -> list[str]:
    """Copy the training data's tokenizer, unless the folder has it. A tokenizer of other ids is removed."""
    kept = folder / "tokenizer.json"
    if is_file(kept) and fingerprint(kept) == info.fingerprint:
        return []
    warnings = []
    if is_file(kept):
        warnings = [
            f"the data have the tokenizer {info.name}, not the one beside the weights: checkpoints keep the data's"
        ]
        for name in companions.TOKENIZER_FILES:
            (folder / name).unlink(missing_ok=True)
    for name in filter(None, (config.data.tokenizer, info.name)):
        source = Path(name)
        if not why_unreadable(source) and fingerprint(source) == info.fingerprint:
            beside = [source.parent / file for file in companions.TOKENIZER_FILES[1:]]
            for path in itertools.filterfalse(why_unreadable, beside):
                companions.write_companion(folder, path.name, path.read_bytes())
            companions.write_companion(folder, kept.name, source.read_bytes())
            break
    return warnings
