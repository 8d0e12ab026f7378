"""Needs of a run that grow with its input, against the limits of the operating system of this host.

| resource | grows with | limit |
|---|---|---|
| open files | datasets; processes, each with a connection to the store of rank 0 | `ulimit -n` |
| memory maps | datasets | `vm.max_map_count` |
| processes | ranks on the host, each with threads and a writer of checkpoints | `ulimit -u` |
| shared memory | state of the ranks on the host, if copies are kept in memory | file system, control group |

An epoch of a dataset that is open has FILES_PER_EPOCH files in as many maps: the index and the tokens of the dataset,
and the sample index. Where a limit is low fewer epochs stay open, and samples of the others open theirs again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from megascale.config.data import DataConfig, dataset_prefixes
from megascale.config.finding import Finding
from megascale.config.train import CheckpointConfig
from megascale.core.limits import memory_limits, memory_map_limit, open_file_limits, process_limits
from megascale.core.units import format_bytes

FILES_PER_EPOCH = 3

EPOCHS_PER_DATASET = 2  # open epochs of a dataset: a step that crosses the end of an epoch reads from two
MIN_OPEN_EPOCHS = 8  # open epochs of a split with many datasets, however low the limits are

MIN_FILES, USUAL_FILES = 64, 256
"""Open files of a rank besides datasets and the store: at least (20 to 40 are measured on CPUs), and with room for the
connections of a few groups, libraries and the files of a checkpoint."""

RANK_THREADS = 8  # threads of one of several ranks: at least (8 are measured on CPUs, most of them gloo's)
MEMORY_COPIES = 2  # copies of its state that a rank has in memory: the last complete one, and the next


def datasets_by_split(data: DataConfig, eval_every: int) -> list[int]:
    """Number of datasets of training, and of validation if the run evaluates."""
    train, valid = dataset_prefixes(data.train), dataset_prefixes(data.valid)
    return [len(train), len(valid or train)] if eval_every else [len(train)]


def min_open_files(datasets: Sequence[int], world: int) -> int:
    """Open files that rank 0 of `world` ranks needs at least. `datasets`: of each split."""
    splits = [min(EPOCHS_PER_DATASET * count, MIN_OPEN_EPOCHS) for count in datasets]
    return MIN_FILES + _store_connections(world) + FILES_PER_EPOCH * sum(splits)


def wanted_open_files(datasets: Sequence[int], world: int) -> int:
    """Open files of a rank that never opens a file twice."""
    epochs = EPOCHS_PER_DATASET * sum(datasets) + 1  # one is opened before another is closed
    return USUAL_FILES + 4 * _store_connections(world) + FILES_PER_EPOCH * epochs


def max_open_epochs(datasets: Sequence[int], world: int, of_split: int) -> int:
    """Most epochs of the `of_split` datasets of a split that this process may hold open, by its limits."""
    files = open_file_limits()[0] - USUAL_FILES - _store_connections(world)
    most = min(files, memory_map_limit() // 2) // FILES_PER_EPOCH
    return min(EPOCHS_PER_DATASET * of_split, max(MIN_OPEN_EPOCHS, most // len(datasets)))


def limit_findings(datasets: Sequence[int], world: int, ranks: int, *, saves: bool) -> Iterator[Finding]:
    """Compare limits of this host with what `ranks` ranks on it need at least. `saves`: each has a writer of
    checkpoints.
    """
    _, files = open_file_limits()
    if files < (needed := min_open_files(datasets, world)):
        message = f"a process on this host may open {files} files, a rank needs {needed} or more"
        hint = f"`ulimit -n {wanted_open_files(datasets, world)}`, by root or the service manager"
        yield Finding("open files", message, hint)
    _, processes = process_limits()
    needed = ranks * saves + (1 if world == 1 else RANK_THREADS * ranks + 1)  # one of them has the store's process
    if processes < needed and os.geteuid() != 0:
        message = f"a user of this host may have {processes} processes and threads, {ranks} ranks need {needed} or more"
        yield Finding("processes", message, f"`ulimit -u {8 * needed}`, by root or the service manager")


def memory_findings(settings: CheckpointConfig, ranks: int, state_bytes: int) -> Iterator[Finding]:
    """Compare the free space of `checkpoint.in_memory_dir` with the copies of `ranks` ranks with `state_bytes` each. A
    run that starts again has its copies there already, so a lack is certain at the first start only.
    """
    if not (settings.every and settings.in_memory_every):
        return
    free, needed = _free_bytes(settings.in_memory_dir), MEMORY_COPIES * ranks * state_bytes
    if free is not None and free < needed:
        message = f"{settings.in_memory_dir} has {format_bytes(free)} free, copies of {ranks} ranks need up to "
        hint = "a larger file system (`mount -o remount,size=...`, `docker run --shm-size`), or fewer ranks on a host"
        yield Finding("checkpoint.in_memory_dir", message + format_bytes(needed), hint)


def _store_connections(world: int) -> int:
    return world if world > 1 else 0


def _free_bytes(folder: str) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return min(status.f_bavail * status.f_frsize, memory_limits()[1])
