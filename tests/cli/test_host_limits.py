"""Runs under limits of open files: soft limits are raised, hard limits below the least need are refused."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.datasets import write_dataset
from tests.runs import GPT, settings, write_config


def run(folder: Path, limits: tuple[int, int], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megascale", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(settings(GPT, tmp_path, parallel__dp=8), tmp_path / "run.toml")
    return tmp_path


def test_a_hard_limit_below_the_need_is_refused_before_the_first_step(folder: Path) -> None:
    done = run(folder, (60, 70), "train", "run.toml")
    assert done.returncode == 2
    assert (
        "  open files: a process on this host may open 70 files, a rank needs 72 or more  -> `ulimit -n " in done.stderr
    )
    assert not (folder / "test" / "metrics.jsonl").exists()


def test_check_warns(folder: Path) -> None:
    done = run(folder, (60, 70), "check", "run.toml")
    assert done.returncode == 0
    assert done.stderr.startswith("WARNING: this host  open files: a process on this host may open 70 files")
    as_json = json.loads(run(folder, (60, 70), "check", "run.toml", "--json").stdout)
    assert as_json["ok"]
    assert len(as_json["warnings"]) == 1
    assert run(folder, (60, 1000), "check", "run.toml").stderr == ""


@pytest.mark.slow
def test_400_datasets_train_under_1024_files(tmp_path: Path) -> None:
    """Across epochs and with a held-out part: a dataset has 2 samples to train on, and the run takes 3 of each."""
    write_dataset(tmp_path / "set", [20, 20, 20, 20])
    for number in range(400):
        for end in (".bin", ".idx", ".json"):
            shutil.copy(tmp_path / f"set{end}", tmp_path / f"set{number}{end}")
    tree = settings(GPT | {"vocab_size": 60_000}, tmp_path, train__steps=2, optimizer__warmup_steps=1, data__mock=False)
    tree["batch"] = {"micro": 300, "global": 600}
    tree["data"] |= {"train": [[1.0, str(tmp_path / f"set{number}")] for number in range(400)]}
    write_config(tree, tmp_path / "run.toml")
    done = run(
        tmp_path, (256, 1024), "train", "run.toml", "train.eval_every=2", "train.eval_steps=1", "data.split=[1.0, 1.0]"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 2/2  loss" in done.stdout
