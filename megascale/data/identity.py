"""The identity of a token dataset: sizes, and a digest of a few pieces of its files, read in milliseconds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from megascale.config.run import RunConfig, dataset_prefixes
from megascale.core.files import write_text
from megascale.core.readable import file_facts, is_url

IDENTITY_FILE = "datasets.json"
"""File in the run's folder: the identities of the run's datasets by prefix, at its last start."""

PIECE_BYTES = 64 << 10
"""Bytes read at the head, in the middle and at the end of each file."""


def dataset_identity(prefix: str) -> str:
    """Return the sizes of PREFIX.idx and PREFIX.bin and a digest of pieces of both, or the error of a file that cannot
    be read. A dataset that was replaced has another identity, unless it differs between the pieces only.
    """
    digest, sizes = hashlib.sha256(), []
    if is_url(prefix):
        return _remote_identity(prefix)
    try:
        for ending in (".idx", ".bin"):
            with open(f"{prefix}{ending}", "rb") as file:
                size = file.seek(0, 2)
                sizes.append(size)
                for start in (0, size // 2, max(size - PIECE_BYTES, 0)):
                    file.seek(start)
                    digest.update(file.read(PIECE_BYTES))
    except OSError as error:
        return f"{Path(error.filename or prefix).name} cannot be read: {error.strerror}"
    return f"{sizes[1]} bytes of tokens, digest {digest.hexdigest()[:16]}"


def _remote_identity(prefix: str) -> str:
    try:
        index, tokens = (file_facts(prefix + ending) for ending in (".idx", ".bin"))
    except OSError as error:
        return f"{prefix} cannot be read: {error.strerror}"
    version = hashlib.sha256(f"{index}{tokens}".encode()).hexdigest()[:16]
    return f"{tokens.size} bytes of tokens, version {version}"


def run_prefixes(config: RunConfig) -> list[str]:
    """The prefixes of a run's datasets, each once. `config`: resolved."""
    sources = () if config.data.mock else (config.data.train, config.data.valid)
    return list(dict.fromkeys(prefix for source in sources for prefix in dataset_prefixes(source)))


def run_identities(config: RunConfig) -> dict[str, str]:
    """The identities of a run's datasets, by prefix. `config`: resolved."""
    return {prefix: dataset_identity(prefix) for prefix in run_prefixes(config)}


def write_identities(config: RunConfig) -> None:
    """Write the identities of a run's datasets into its folder."""
    write_text(config.folder / IDENTITY_FILE, json.dumps(run_identities(config), indent=1) + "\n")


def replaced_datasets(config: RunConfig) -> list[str]:
    """Describe datasets with another identity than at the run's last start; none for a run that has not started."""
    try:
        before = json.loads((config.folder / IDENTITY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(before, Mapping):
        return []
    return [
        f"{prefix} is another dataset than at the run's last start: {before[prefix]} then, {identity} now; a run that "
        "resumes continues with the order of its samples"
        for prefix, identity in run_identities(config).items()
        if before.get(prefix, identity) != identity
    ]
