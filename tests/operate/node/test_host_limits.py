"""Needs that grow with the input of a run, against limits of the host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megascale.config.finding import Finding
from megascale.config.run import RunConfig
from megascale.operate.node import host_limits
from megascale.operate.node.host_limits import datasets_by_split, memory_findings
from tests.runs import GPT, config_of, settings


def needs(config: RunConfig) -> tuple[list[int], int]:
    return datasets_by_split(config.data, config.train.eval_every), config.world_size


def wanted_open_files(config: RunConfig) -> int:
    return host_limits.wanted_open_files(*needs(config))


def min_open_files(config: RunConfig) -> int:
    return host_limits.min_open_files(*needs(config))


def max_open_epochs(config: RunConfig, of_split: int) -> int:
    return host_limits.max_open_epochs(*needs(config), of_split)


def limit_findings(config: RunConfig, ranks: int) -> list[Finding]:
    return list(host_limits.limit_findings(*needs(config), ranks, saves=bool(config.checkpoint.every)))


def run_of(folder: Path, datasets: int = 0, **overrides: object) -> RunConfig:
    """A configuration that trains on a blend of `datasets`."""
    config = config_of(settings(GPT, folder, **overrides), folder)
    blend = [(1.0, str(folder / f"set{number}")) for number in range(datasets)]
    return config.model_copy(update={"data": config.data.model_copy(update={"train": blend or None})})


@pytest.fixture
def file_limit(monkeypatch: pytest.MonkeyPatch) -> object:
    """A function that sets the soft and hard limit of open files."""

    def set_limit(soft: int, hard: int) -> None:
        monkeypatch.setattr(host_limits, "open_file_limits", lambda: (soft, hard))

    return set_limit


def test_the_need_of_files_grows_with_datasets_splits_and_ranks(tmp_path: Path) -> None:
    one, many = run_of(tmp_path, 1), run_of(tmp_path, 400)
    evaluated = run_of(tmp_path, 400, train__eval_every=1)
    assert wanted_open_files(many) - wanted_open_files(one) == 399 * 2 * 3
    assert wanted_open_files(evaluated) - wanted_open_files(many) == 400 * 2 * 3
    assert min_open_files(one) < min_open_files(many) < min_open_files(evaluated) < 256  # whatever their number is
    ranks = run_of(tmp_path, 1, parallel__dp=8)
    assert min_open_files(ranks) - min_open_files(one) == 8


def test_all_epochs_stay_open_where_the_limits_allow(tmp_path: Path, file_limit: object) -> None:
    config = run_of(tmp_path, 400)
    file_limit(wanted_open_files(config), 1 << 20)  # type: ignore[operator]
    assert max_open_epochs(config, 400) == 800
    assert max_open_epochs(run_of(tmp_path, 1), 1) == 2


def test_fewer_stay_open_under_a_low_limit(tmp_path: Path, file_limit: object, monkeypatch: pytest.MonkeyPatch) -> None:
    config, evaluated = run_of(tmp_path, 400), run_of(tmp_path, 400, train__eval_every=1)
    file_limit(1024, 1024)  # type: ignore[operator]
    assert max_open_epochs(config, 400) == (1024 - 256) // 3
    assert max_open_epochs(evaluated, 400) == (1024 - 256) // 3 // 2
    assert not limit_findings(config, 1)
    file_limit(sys.maxsize, sys.maxsize)  # type: ignore[operator]
    monkeypatch.setattr(host_limits, "memory_map_limit", lambda: 1000)
    assert max_open_epochs(config, 400) == 166


def test_a_limit_below_the_least_need_is_found(tmp_path: Path, file_limit: object) -> None:
    config = run_of(tmp_path, 400, parallel__dp=8)
    file_limit(50, min_open_files(config) - 1)  # type: ignore[operator]
    [finding] = limit_findings(config, 8)
    assert finding.message == "a process on this host may open 95 files, a rank needs 96 or more"
    assert f"ulimit -n {wanted_open_files(config)}" in finding.hint


def test_processes_are_counted_for_other_users_than_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_of(tmp_path, parallel__dp=8, checkpoint__every=1)
    monkeypatch.setattr(host_limits, "process_limits", lambda: (10, 8 * 8 + 8))
    monkeypatch.setattr(host_limits.os, "geteuid", lambda: 1000)
    [finding] = limit_findings(config, 8)
    assert finding.message == "a user of this host may have 72 processes and threads, 8 ranks need 73 or more"
    assert not list(limit_findings(config, 7))
    monkeypatch.setattr(host_limits, "process_limits", lambda: (2, 2))
    assert not list(limit_findings(run_of(tmp_path, checkpoint__every=1), 1))
    monkeypatch.setattr(host_limits.os, "geteuid", lambda: 0)
    assert not list(limit_findings(config, 8))


def test_copies_in_memory_that_do_not_fit_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_of(
        tmp_path, checkpoint__every=1, checkpoint__in_memory_every=1, checkpoint__in_memory_dir=str(tmp_path)
    )
    assert not list(memory_findings(config.checkpoint, 1, 1000))
    monkeypatch.setattr(host_limits, "_free_bytes", lambda folder: 1 << 10)
    [finding] = memory_findings(config.checkpoint, 2, 1000)
    assert "has 1.00 KiB free, copies of 2 ranks need up to 3.91 KiB" in finding.message
    assert not list(memory_findings(run_of(tmp_path, checkpoint__every=1).checkpoint, 2, 1000))
