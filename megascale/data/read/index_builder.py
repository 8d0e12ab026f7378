"""The index of a dataset's next epoch, built by a process of its own while the run reads the epoch before.

python -m megascale.data.read.index_builder FOLDER KEY
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from megascale.core.files import exists, lock_to_build
from megascale.core.process import module_command
from megascale.data.read.best_fit import BestFitShape
from megascale.data.read.decomposed_index import DecomposedShape
from megascale.data.read.epoch_index import IndexShape
from megascale.data.read.index_files import IndexKey, open_dataset_of, write_index

NICENESS = 10  # priority below that of training


def build_in_background(folder: Path, key: IndexKey) -> None:
    """Start a process that builds an index file, unless the file exists, a process builds it, or the index is small.
    The new process inherits the lock, so that nobody else builds. Failures show where the index is opened.
    """
    path = folder / key.file_name
    if key.is_small:
        return
    with contextlib.suppress(OSError):
        lock = None if exists(path) else lock_to_build(path)
        if lock is None:
            return
        with lock:
            subprocess.Popen(
                module_command(__name__, str(folder), json.dumps(asdict(key))),
                pass_fds=[lock.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C on the terminal is for the run
            )


def main() -> None:
    """Build the index of KEY; this process has its lock."""
    os.nice(NICENESS)
    facts = json.loads(sys.argv[2])
    by_key: dict[str, type[IndexShape]] = {"rows": BestFitShape, "piece": DecomposedShape}
    shape = next((kind for key, kind in by_key.items() if key in facts["shape"]), IndexShape)
    key = IndexKey(**(facts | {"shape": shape(**facts["shape"])}))
    path = Path(sys.argv[1]) / key.file_name
    if not exists(path):
        write_index(path, key, open_dataset_of(key, path.parent))
    path.with_name(f".{path.name}.lock").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
