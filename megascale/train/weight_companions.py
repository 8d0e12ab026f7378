"""Companions of a run: the files beside the weights that it began with, and the tokenizer of its training data."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from megascale.checkpoint import companions
from megascale.config.data import DataConfig
from megascale.config.run import HF_PREFIX, dataset_prefixes
from megascale.core.errors import CheckpointError
from megascale.core.files import fingerprint, is_file, is_folder, why_unreadable
from megascale.core.storage import WRITE_HINT, Location
from megascale.data.read.indexed_dataset import TokenizerInfo, read_info


def keep_companions(run: Path, data: DataConfig, resume: str, resumed_from: Location | None) -> list[str]:
    """Write the companions' folder in the folder of a run, which its checkpoints copy. Called on rank 0 before the
    first step.

    `resume`: `checkpoint.resume`. `resumed_from`: the checkpoint that the run continues, if any. Returns warnings.
    Raises: CheckpointError if the folder cannot be written, DataError for an unreadable description of a dataset
    """
    folder = run / companions.FOLDER
    infos = (read_info(prefix) for prefix in dataset_prefixes(data.train))
    try:
        if resumed_from is not None and not is_folder(folder):
            folder.mkdir(parents=True)
            companions.copy_companions(resumed_from, Location(str(folder)))
        elif resumed_from is None and resume.startswith(HF_PREFIX):
            _copy_foreign(Path(resume.removeprefix(HF_PREFIX)), folder)
        # none for random tokens and for datasets of other tools
        if not (tokenizer := next((info.tokenizer for info in infos if info), None)):
            return []
        text = json.dumps(asdict(tokenizer), indent=1) + "\n"
        companions.write_companion(folder, companions.DATA_TOKENIZER, text.encode())
        return _keep_tokenizer(folder, tokenizer, [data.tokenizer or "", tokenizer.name])
    except OSError as error:
        what = f"the files beside the weights cannot be kept: {error.filename}: {error.strerror}"
        raise CheckpointError(what, hint=WRITE_HINT) from None


def _copy_foreign(source: Path, folder: Path) -> None:
    for name in companions.COMPANIONS:
        if is_file(source / name):
            companions.write_companion(folder, name, (source / name).read_bytes())
    companions.write_companion(folder, companions.SOURCE_CONFIG, (source / "config.json").read_bytes())


def _keep_tokenizer(folder: Path, info: TokenizerInfo, sources: Iterable[str]) -> list[str]:
    """Copy the training data's tokenizer from a file that has it, unless the folder does. A tokenizer of other ids is
    removed.
    """
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
    for name in filter(None, sources):
        source = Path(name)
        if not why_unreadable(source) and fingerprint(source) == info.fingerprint:
            beside = [source.parent / file for file in companions.TOKENIZER_FILES[1:]]
            for path in itertools.filterfalse(why_unreadable, beside):
                companions.write_companion(folder, path.name, path.read_bytes())
            companions.write_companion(folder, kept.name, source.read_bytes())
            break
    return warnings
