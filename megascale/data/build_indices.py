"""All index files that a run needs, built before it starts."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from megascale.config.dataset_files import SplitName
from megascale.config.run import RunConfig
from megascale.core.errors import DataError
from megascale.core.files import exists
from megascale.data.index_files import IndexKey, check_index, open_dataset_of, open_index
from megascale.data.mixture import Mixture


@dataclass(frozen=True)
class BuiltIndices:
    """Numbers of index files that were `built`, and `found`; of epochs whose index is `small` and needs no file; and
    the `bytes` of all files.
    """

    built: int
    found: int
    small: int
    bytes: int


def build_indices(
    config: RunConfig, workers: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> BuiltIndices:
    """Build the missing index files of a run, and check those that exist. `config`: resolved. `progress`: called with
    the files that are done, and all that are missing.

    Raises: DataError for unusable datasets, damaged files, and a folder that cannot be written
    """
    keys = [(folder, key) for split in splits(config) for folder, key in _keys(config, split)]
    large = list(dict.fromkeys((folder, key.file_name) for folder, key in keys if not key.is_small))
    by_name = {(folder, key.file_name): key for folder, key in keys}
    missing = [(folder, by_name[folder, name]) for folder, name in large if not exists(folder / name)]
    for folder, name in large:
        if exists(folder / name):
            check_index(folder / name, by_name[folder, name])
    for done, _ in enumerate(_built(missing, workers), start=1):
        progress(done, len(missing))
    size = sum((folder / name).stat().st_size for folder, name in large)
    return BuiltIndices(len(missing), len(large) - len(missing), len(keys) - len(large), size)


def splits(config: RunConfig) -> tuple[SplitName, ...]:
    """The splits that a run reads."""
    return ("train", "valid") if config.train.eval_every else ("train",)


def expected_samples(config: RunConfig, split: SplitName) -> int:
    """Samples of a split that a run reads, at most."""
    return config.samples if split == "train" else config.train.eval_steps * config.batch.total


def _keys(config: RunConfig, split: SplitName) -> Iterator[tuple[Path, IndexKey]]:
    mixture = Mixture(config, split, expected_samples(config, split))
    mixture.check()
    for dataset in mixture.datasets:
        for epoch in range(dataset.epochs if split == "train" else 1):
            yield dataset.index_folder, dataset.index_key(epoch)


def _built(missing: list[tuple[Path, IndexKey]], workers: int) -> Iterator[None]:
    """Build index files, in worker processes if there are several."""
    folders, keys = [folder for folder, _ in missing], [key for _, key in missing]
    if min(workers, len(missing)) <= 1:
        yield from map(_build, folders, keys)
        return
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(min(workers, len(missing)), mp_context=context) as pool:
            yield from pool.map(_build, folders, keys)
    except BrokenProcessPool:
        what = "a worker process died: it was killed, perhaps because memory ran out"
        raise DataError(what, hint="the same command continues; fewer --workers, or more memory") from None


def _build(folder: Path, key: IndexKey) -> None:
    open_index(folder, key, open_dataset_of(key, folder))
