"""Companion files of weights: a tokenizer, the configuration of foreign weights, and what a dataset's preparation said.

A run keeps companions in its folder, and each of its checkpoints holds copies: a checkpoint converts and samples
anywhere, as the weights that the run began with did.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from megascale.checkpoint import folders
from megascale.checkpoint.format import manifest
from megascale.core.errors import CheckpointError
from megascale.core.files import atomic_file
from megascale.core.limits import os_error_hint
from megascale.core.run_folder import check_known
from megascale.core.storage import WRITE_HINT, Location

FOLDER = "companions"  # the folder of companions in a run's folder
SOURCE_CONFIG = "huggingface.json"  # the config.json of foreign weights, with keys that `[model]` lacks

DATA_TOKENIZER = "data_tokenizer.json"
"""The tokenizer of the training data: the fields of `data.read.indexed_dataset.TokenizerInfo`."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "tekken.json",
                   "chat_template.jinja", "chat_template.json")  # fmt: skip
"""Files of a tokenizer, of which foreign weights have some."""

COMPANIONS = (*TOKENIZER_FILES, "generation_config.json")  # files beside foreign weights that go along
ALL = (*COMPANIONS, SOURCE_CONFIG, DATA_TOKENIZER)  # files beside the weights of a checkpoint


def copy_companions(source: Location, target: Location, names: tuple[str, ...] = ALL) -> dict[str, manifest.StoredFile]:
    """Copy the files of `names` that `source` has into the existing folder `target`. Returns sizes and checksums, which
    are compared with those in the manifest of a checkpoint.

    Raises: OSError; DamagedError if a checkpoint's file is not as written
    """
    expected = manifest.read(source).files if (source / manifest.NAME).exists() else {}
    copied = {}
    for name in names:
        if (source / name).exists():
            data = (source / name).read()
            copied[name] = manifest.StoredFile(bytes=len(data), crc32=zlib.crc32(data))
            if expected.get(name, copied[name]) != copied[name]:
                raise manifest.DamagedError(f"{source / name} is damaged: its size or CRC-32 does not match")
            (target / name).write(data)
    return copied


def make_checkpoint_folder(
    folder: Location, step: int, companions: Path
) -> tuple[Location, dict[str, manifest.StoredFile]]:
    """Make the folder of a checkpoint within `folder`, with copies of the run's `companions`, which it returns, too.

    Raises: CheckpointError
    """
    check_known(companions.parent)
    try:
        path = folders.fresh_folder(folder, step)
        path.make_folder()
        return path, copy_companions(Location(str(companions)), path)
    except OSError as error:
        what = f"rank 0: cannot make {error.filename}: {error.strerror or error}"
        raise CheckpointError(what, hint=os_error_hint(error, WRITE_HINT)) from None


def write_companion(folder: Path, name: str, data: bytes) -> None:
    """Write a companion atomically into a folder, which is made if it is missing. Raises: OSError"""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / name) as file:
        file.write(data)
