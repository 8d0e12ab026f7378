"""All index files that a run needs, built before it starts."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from megascale.core.errors import DataError
from megascale.core.files import exists
from megascale.data.mix.mixture import Mixture
from megascale.data.read.index_files import IndexKey, map_index, open_dataset_of, open_index


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
    mixtures: Iterable[Mixture], workers: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> BuiltIndices:
    """Build the missing index files of a run, and check those that exist. `mixtures`: of the run's splits, with the
    expected samples of each. `progress`: called with the numbers of files done and of missing files.

    Raises: DataError for unusable datasets, damaged files, and a folder that cannot be written
    """
    keys = list[tuple[Path, IndexKey]]()
    for mixture in mixtures:
        mixture.check()
        for dataset in mixture.datasets:
            epochs = range(dataset.epochs if mixture.spec.is_train else 1)
            keys += [(dataset.index_folder, dataset.index_key(epoch)) for epoch in epochs]
    large = list(dict.fromkeys((folder, key.file_name) for folder, key in keys if not key.is_small))
    by_name = {(folder, key.file_name): key for folder, key in keys}
    missing = [(folder, by_name[folder, name]) for folder, name in large if not exists(folder / name)]
    for folder, name in large:
        if exists(folder / name):
            map_index(folder / name, by_name[folder, name], again=True)
    for done, _ in enumerate(_built(missing, workers), start=1):
        progress(done, len(missing))
    size = sum((folder / name).stat().st_size for folder, name in large)
    return BuiltIndices(len(missing), len(large) - len(missing), len(keys) - len(large), size)


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
