"""Epochs that stay open: those used last, within the limits of the process."""

from __future__ import annotations

import errno
import os
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megascale.config.dataset_files import SplitName
from megascale.core.errors import DataError
from megascale.data.mix.epochs import OpenEpochs
from megascale.data.read import index_files
from megascale.operate.node import host_limits
from tests.data.datasets import data_config, mixture_of, write_dataset


def test_the_epochs_used_last_stay_open() -> None:
    opened: list[int] = []
    epochs = OpenEpochs(2)

    def read(key: int) -> None:
        assert epochs.get(key, lambda: opened.append(key) or f"epoch {key}") == f"epoch {key}"

    for key in (1, 2, 1, 3, 1, 2):
        read(key)
    assert opened == [1, 2, 3, 2]


def open_files(folder: Path) -> int:
    """Return how many files of a folder this process has open."""
    names = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum(name.startswith(str(folder)) for name in names)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_blend_of_many_datasets_has_few_files_open(
    split: SplitName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 datasets of 2 samples in 8 open epochs give the same samples as in 40."""
    monkeypatch.setattr(index_files, "MEMORY_ENTRIES", 0)
    monkeypatch.setattr(host_limits, "open_file_limits", lambda: (0, 0))
    blend = [(1.0, tmp_path / f"set{number}") for number in range(20)]
    for number, (_, prefix) in enumerate(blend):
        write_dataset(prefix, [5, 6, 6, 5, 6, 6], first=100 * number)
    config = data_config(tmp_path, blend, data__split=[1.0, 1.0], train__eval_every=1)
    samples = mixture_of(config, split)
    assert not open_files(tmp_path), "files are opened when they are read"
    seen, most = [], 0
    for number in range(40):
        seen.append(samples[number].labels.tolist())
        most = max(most, open_files(tmp_path))
    assert 0 < most <= host_limits.FILES_PER_EPOCH * host_limits.MIN_OPEN_EPOCHS
    documents = {label // 100 for label in chain(*seen)}
    assert documents == set(range(20))
    monkeypatch.setattr(host_limits, "open_file_limits", lambda: (sys.maxsize, sys.maxsize))
    unlimited = mixture_of(config, split)
    assert seen == [unlimited[number].labels.tolist() for number in range(40)]


def test_too_many_open_files_name_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(tmp_path / "set", [30, 30])
    samples = mixture_of(data_config(tmp_path, tmp_path / "set"))
    samples.check()

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(np, "memmap", fail)
    with pytest.raises(DataError, match=r"set cannot be read: Too many open files  -> `ulimit -n`"):
        samples[0]
