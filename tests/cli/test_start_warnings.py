"""What is hardly meant is said by `check`, and once as `train` and `launch` start."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.cli.main import main
from megascale.operate.driver import one_host, supervisor
from tests.data.datasets import VOCABULARY, write_dataset
from tests.jobs import job_config
from tests.runs import GPT

EXPECTED = (
    "WARNING: checkpoint.every = 0: 5000 steps of 2 processes save nothing, and every restart begins at step 0",
    "WARNING: train.steps = 5000 reads ",
    "WARNING: train.eval_steps has no effect with eval_every = 0  -> remove the key",
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two processes whose launchers start none."""

    async def supervise(*_: object) -> int:
        return 0

    monkeypatch.setattr(one_host, "run_on_this_host", lambda *_: 0)
    monkeypatch.setattr(supervisor, "supervise", supervise)
    write_dataset(tmp_path / "d", [100, 100])
    data = {"data__train": str(tmp_path / "d"), "data__mock": False, "data__split": [1.0, 0.0]}
    keys = {"train__steps": 5000, "train__eval_steps": 3, "checkpoint__every": 0, "parallel__dp": 2}
    return job_config(tmp_path, GPT | {"vocab_size": VOCABULARY}, **data, **keys)


@pytest.mark.parametrize("command", ["check", "train", "launch"])
def test_a_run_that_is_hardly_meant(command: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [command, str(config), *(["--nodes", "1"] if command == "launch" else [])]
    assert main(words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [next((line for line in lines if line.startswith(text)), "") != "" for text in EXPECTED] == [True] * 3
    rest = ["optimizer.warmup_steps=1", f"data.valid={config.parent}/d", "batch.global=2", "train.eval_steps=1"]
    assert main([*words, "train.steps=2", "train.eval_every=1", "checkpoint.every=1", *rest]) == 0
    assert not [line for line in capsys.readouterr().err.splitlines() if line.startswith(EXPECTED)]
