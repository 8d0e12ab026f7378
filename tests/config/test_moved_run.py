"""The configuration in a run's folder belongs to this folder, wherever the folder is moved or copied."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megascale.config.loading import load_config
from megascale.config.toml_writer import to_toml
from megascale.core.errors import ConfigError
from tests.jobs import Job, job_config
from tests.runs import GPT, settings, write_config


def run_in(parent: Path, **overrides: Any) -> Path:
    """Make the folder of a run that has trained, and return it."""
    config = load_config(str(write_config(settings(GPT, parent, **overrides) | {"name": "m"}, parent / "m.toml")))
    config.folder.mkdir()
    (config.folder / "config.toml").write_text(to_toml(config))
    (config.folder / "metrics.jsonl").touch()
    return config.folder


def folder_of(file: Path, *words: str) -> Path:
    return load_config(str(file), words).folder


def test_a_moved_run_goes_on_where_it_lies(tmp_path: Path) -> None:
    run_in(tmp_path / "a")
    moved = (tmp_path / "a").rename(tmp_path / "b") / "m"
    assert folder_of(moved / "config.toml") == moved
    renamed = moved.rename(tmp_path / "b" / "n")
    config = load_config(str(renamed / "config.toml"))
    assert (config.name, config.folder, config.checkpoint_folder) == ("n", renamed, f"{renamed}/checkpoints")


def test_a_copied_run_leaves_the_original_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = run_in(tmp_path / "a")
    copy = Path(shutil.copytree(original, tmp_path / "copy"))
    assert folder_of(original / "config.toml") == original
    assert folder_of(copy / "config.toml") == copy
    assert folder_of(copy / "config.toml", "name=other") == tmp_path / "other"
    assert folder_of(copy / "config.toml", f"output_dir={tmp_path / 'c'}") == tmp_path / "c" / "copy"
    base = write_config({"extends": str(copy / "config.toml")}, tmp_path / "experiment.toml")
    assert folder_of(base) == copy
    monkeypatch.chdir(copy)
    assert folder_of(Path("config.toml")) == copy


def test_the_name_of_a_folder_that_names_no_run_is_a_mistake(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run_in(tmp_path / "a"), tmp_path / "a copy"))
    with pytest.raises(ConfigError, match=r"the folder of .*a copy/config.toml  name: 'a copy' cannot name a folder"):
        folder_of(copy / "config.toml")


def test_one_folder_by_two_paths_is_one(tmp_path: Path) -> None:
    original = run_in(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "latest").symlink_to(original)
    assert folder_of(tmp_path / "link" / "m" / "config.toml") == original
    assert folder_of(tmp_path / "latest" / "config.toml") == original


def test_a_users_file_of_this_name_is_no_run(tmp_path: Path) -> None:
    config = write_config(settings(GPT, tmp_path / "runs"), tmp_path / "config.toml")
    assert folder_of(config) == tmp_path / "runs" / "test"


@pytest.mark.parametrize("key", ["checkpoint.dir", "observe.store_dir"])
def test_a_folder_that_copies_would_share_is_asked_for(key: str, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    copy = shutil.copytree(run_in(tmp_path / "a", **{key.replace(".", "__"): str(shared)}), tmp_path / "copy" / "m")
    with pytest.raises(ConfigError) as error:
        folder_of(copy / "config.toml")
    (problem,) = error.value.problems
    assert problem.key == key and f"{shared} belongs to the run in {tmp_path / 'a' / 'm'}" in problem.message
    assert f"for a run that was moved write {key}={shared} on the command line" in problem.hint
    assert folder_of(copy / "config.toml", f"{key}={shared}") == copy


@pytest.mark.slow
def test_a_copy_trains_on_and_the_original_stays(tmp_path: Path) -> None:
    job = Job(job_config(tmp_path, GPT, train__steps=4, checkpoint__every=4, optimizer__decay="constant"))
    assert job.end()[0] == 0
    copy = Path(shutil.copytree(job.folder, tmp_path / "copy"))
    status, out, err = Job(copy / "config.toml", "train.steps=6", "optimizer.lr=1e-3").end()
    assert status == 0, err
    assert f"resumed from {copy / 'checkpoints' / 'step-00000004'}" in out.replace("\n", "")
    assert (copy / "checkpoints" / "step-00000006").is_dir()
    assert [path.name for path in (job.folder / "checkpoints").iterdir()] == ["step-00000004"]
    assert job.steps()[-1]["step"] == 4
