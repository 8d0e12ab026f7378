"""`megascale check` with datasets: epochs, and datasets that were replaced since the run's last start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megascale.cli.main import main
from megascale.data.read.identity import IDENTITY_FILE, replaced_datasets, run_identities, write_identities
from tests.data.datasets import data_config, write_dataset
from tests.runs import GPT, settings, write_config


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A run of 10 steps of 8 samples on two datasets of 10 and 100 samples."""
    for name, length in (("a", 161), ("b", 1601)):
        write_dataset(tmp_path / name, [length])
    tree = settings(GPT | {"vocab_size": 60_000}, tmp_path, data__mock=False, data__split=[1.0, 0.0])
    tree["data"]["train"] = [[1.0, str(tmp_path / "a")], [3.0, str(tmp_path / "b")]]
    return str(write_config(tree, tmp_path / "run.toml"))


def test_check_tells_the_epochs(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", path]) == 0
    assert "\ntrains on 1.76k tokens of 2 datasets, 2 epochs at most\n" in capsys.readouterr().out
    assert main(["check", path, f"data.train={tmp_path / 'b'}"]) == 0
    assert "\ntrains on 1.60k tokens of a dataset, 0.8 epochs\n" in capsys.readouterr().out


def test_check_warns_of_a_replaced_dataset(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identities = tmp_path / "test" / IDENTITY_FILE
    identities.parent.mkdir()
    before = {str(tmp_path / name): "another" for name in ("a", "gone")}
    for text in (json.dumps(before), "[]", "", "{"):
        identities.write_text(text)
        assert main(["check", path]) == 0
        warned = capsys.readouterr().err
        if text.startswith('{"'):
            assert warned.startswith(
                f"WARNING: {tmp_path / 'a'} is another dataset than at the run's last start: another"
            )
            assert warned.count("\n") == 1
        else:
            assert not warned
    identities.write_text(json.dumps(before))
    assert main(["check", path, "checkpoint.resume=never"]) == 0
    assert not capsys.readouterr().err


def test_identities_are_kept_and_compared(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", [20])
    config = data_config(tmp_path, tmp_path / "set")
    assert replaced_datasets(config.data, config.folder) == []
    config.folder.mkdir(parents=True)
    write_identities(config.data, config.folder)
    assert list(run_identities(config.data)) == [str(tmp_path / "set")]
    assert replaced_datasets(config.data, config.folder) == []
    write_dataset(tmp_path / "set", [20], first=1)
    [text] = replaced_datasets(config.data, config.folder)
    assert "40 bytes of tokens, digest " in text
