"""Checks of every index whose samples are made of pieces of documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from megascale.data.read import index_builder, index_files


def check_shuffling(build: Callable[[int], Any], sizes: np.ndarray, samples: int) -> None:
    """Check that an epoch is the same for the same seed, and that another seed brings other documents together.

    `build`: the index of a seed, with `pieces(sample, sizes)`: (document, start, stop) each.
    """
    rows = [_rows(build(seed), sizes, samples) for seed in (1, 1, 2)]
    assert rows[0] == rows[1]
    together = [{frozenset(document for document, _, _ in row) for row in epoch} for epoch in rows]
    assert len(together[0] & together[2]) < samples // 4


def _rows(index: Any, sizes: np.ndarray, samples: int) -> list[Sequence[tuple[int, int, int]]]:
    return [index.pieces(sample, sizes) for sample in range(samples)]


def next_index(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Read a sample, run what builds the index of the next epoch in a process of its own, and return that index."""
    monkeypatch.setattr(index_files, "MEMORY_ENTRIES", 0)
    started: list[list[str]] = []
    monkeypatch.setattr(index_builder.subprocess, "Popen", lambda command, **_: started.append(command))
    dataset.read(0)
    (command,) = started
    monkeypatch.setattr(index_builder.sys, "argv", command[command.index("-m") + 1 :])
    monkeypatch.setattr(index_builder.os, "nice", lambda _: 0)
    index_builder.main()
    key = dataset.index_key(1)
    return index_files.map_index(dataset.index_folder / key.file_name, key)
