"""The identity of a token dataset, or of a file of `data.document_order_file`: sizes, and a digest of a few pieces of
the files, read in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from megascale.config.data import DataConfig, dataset_prefixes
from megascale.core.files import write_text
from megascale.core.readable import file_facts, is_url

IDENTITY_FILE = "datasets.json"
"""File in the run's folder: the identities of the run's datasets by prefix, and of `data.document_order_file` by path,
at its last start.
"""

PIECE_BYTES = 64 << 10  # bytes read at the head, in the middle and at the end of each file

DATASET_REPLACED = "dataset", "continues with the order of its samples"
ORDER_REPLACED = "order of documents", "reads samples again and leaves others out"
"""The kind of what was replaced, and the consequence for a run that resumes."""


def dataset_identity(prefix: str) -> str:
    """Return the sizes of PREFIX.idx and PREFIX.bin and a digest of pieces of both, or the error of a file that cannot
    be read. A dataset that was replaced has another identity, unless it differs between the pieces only.
    """
    if not is_url(prefix):
        return _local_identity(f"{prefix}.idx", f"{prefix}.bin", what=" of tokens")
    try:
        index, tokens = (file_facts(prefix + ending) for ending in (".idx", ".bin"))
    except OSError as error:
        return f"{prefix} cannot be read: {error.strerror}"
    version = hashlib.sha256(f"{index}{tokens}".encode()).hexdigest()[:16]
    return f"{tokens.size} bytes of tokens, version {version}"


def _local_identity(*paths: str, what: str = "") -> str:
    """The size of the last of some files, and a digest of pieces of all. `what`: what its bytes are."""
    digest, size = hashlib.sha256(), 0
    try:
        for path in paths:
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                for start in (0, size // 2, max(size - PIECE_BYTES, 0)):
                    file.seek(start)
                    digest.update(file.read(PIECE_BYTES))
    except OSError as error:
        return f"{Path(error.filename or paths[0]).name} cannot be read: {error.strerror}"
    return f"{size} bytes{what}, digest {digest.hexdigest()[:16]}"


def run_prefixes(data: DataConfig) -> list[str]:
    """The prefixes of a run's datasets, each once."""
    sources = () if data.mock else (data.train, data.valid)
    return list(dict.fromkeys(prefix for source in sources for prefix in dataset_prefixes(source)))


def run_identities(data: DataConfig) -> dict[str, str]:
    """The identities of a run's datasets by prefix, and of its `data.document_order_file` by path."""
    return {prefix: dataset_identity(prefix) for prefix in run_prefixes(data)} | order_file_identity(data)


def order_file_identity(data: DataConfig) -> dict[str, str]:
    """The identity of a run's `data.document_order_file` by path; empty without one."""
    return {path: _local_identity(path)} if (path := data.document_order_file) else {}


def write_identities(data: DataConfig, folder: Path) -> None:
    """Write the identities of a run's datasets and `data.document_order_file` into its folder."""
    write_text(folder / IDENTITY_FILE, json.dumps(run_identities(data), indent=1) + "\n")


def replaced_datasets(data: DataConfig, folder: Path) -> list[str]:
    """Describe datasets and a `data.document_order_file` with another identity than at the last start of the run in
    `folder`; none for a run that has not started.
    """
    try:
        before = json.loads((folder / IDENTITY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(before, Mapping):
        return []
    found = []
    for name, now in run_identities(data).items():
        if (then := before.get(name, now)) != now:
            kind, consequence = ORDER_REPLACED if name == data.document_order_file else DATASET_REPLACED
            what = f"{name} is another {kind} than at the run's last start: {then} then, {now} now"
            found.append(f"{what}; a run that resumes {consequence}")
    return found
