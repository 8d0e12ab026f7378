"""`megascale data index`: all index files of a run, built before it starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megascale.cli.main import main
from megascale.config.run import RunConfig
from megascale.core.errors import DataError
from megascale.data.mix.build_indices import build_indices
from megascale.data.mix.mixture import Mixture
from megascale.data.read import index_files
from tests.data.datasets import data_config, mixture_of, write_dataset


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run of 320 samples on datasets of 50 (small) and 125 samples, which it reads 3.2 and 1.3 times."""
    monkeypatch.setattr(index_files, "MEMORY_ENTRIES", 100)
    write_dataset(tmp_path / "small", [41] * 10)
    write_dataset(tmp_path / "large", [10] * 101, first=1000)
    blend = [(1.0, tmp_path / "small"), (1.0, tmp_path / "large")]
    write_dataset(tmp_path / "valid", [10] * 101, first=5000)
    return data_config(tmp_path, blend, tmp_path / "valid", train__steps=40, train__eval_every=1)


def mixtures(config: RunConfig) -> list[Mixture]:
    """The samples that the run reads, at most."""
    valid = config.train.eval_steps * config.batch.total
    return [mixture_of(config, "train", config.samples), mixture_of(config, "valid", valid)]


def test_a_run_finds_what_was_built(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, int]] = []
    built = build_indices(mixtures(config), 1, lambda finished, total: done.append((finished, total)))
    assert (built.built, built.found, built.small) == (3, 0, 4)
    assert done == [(1, 3), (2, 3), (3, 3)]
    names = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "cache").glob("*.index"))
    assert names == ["large-epoch0", "large-epoch1", "valid-epoch0"]
    assert built.bytes == sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.index"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.index")}
    again = build_indices(mixtures(config), 2)
    assert (again.built, again.found) == (0, 3)
    for samples in mixtures(config):
        assert all(samples[index].tokens.shape == (8,) for index in range(samples.expected))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.index")} == before


def test_a_damaged_file_is_found(config: RunConfig, tmp_path: Path) -> None:
    build_indices(mixtures(config), 1)
    next((tmp_path / "cache").glob("large-epoch1*")).write_bytes(b"")
    with pytest.raises(DataError, match=r"sample indices are damaged: \S+large-epoch1\S+ has 0 bytes"):
        build_indices(mixtures(config), 1)


def test_zeros_in_an_index_of_the_right_size_are_found(config: RunConfig, tmp_path: Path) -> None:
    """Also when it was checked before and its times are those of before: all of each file is read."""
    build_indices(mixtures(config), 1)
    path = next((tmp_path / "cache").glob("large-epoch0*"))
    times = path.stat()
    with open(path, "r+b") as file:
        file.seek(times.st_size // 2)
        file.write(bytes(64))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(DataError, match=r"damaged: \S+large-epoch0\S+ has a content that its checksum") as raised:
        build_indices(mixtures(config), 1)
    assert raised.value.hint == "remove that file"


def test_the_command(config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "config-in.toml")
    source = f'data.train=[[1.0, "{tmp_path / "small"}"], [1.0, "{tmp_path / "large"}"]]'
    words = ["data", "index", path, "data.mock=false", source, "train.eval_every=0", "--workers", "1"]
    assert main(words) == 0
    assert "2 index files of " in (line := capsys.readouterr().out) and ": 2 built, 0 found; 4 have up to " in line
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["found"] == 2
    assert main(["data", "index", path]) == 3
    assert "mock data has no indices" in capsys.readouterr().err
