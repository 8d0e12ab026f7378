"""`megascale train` as a rank of megascale's launcher."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from megascale.cli import train
from megascale.core.errors import ConfigError, DataError, Exit, MegascaleError
from megascale.core.rank import STORE_VARIABLE
from megascale.core.run_folder import TOKEN
from megascale.operate.driver.classify import classify_ends
from megascale.operate.node.failure import ERROR_FILE
from megascale.operate.node.rank_ends import describe_end
from tests.data.datasets import VOCABULARY, write_dataset
from tests.jobs import job_config
from tests.runs import GPT


def start_rank(config: Path, logs: Path, **env: str) -> None:
    """Load the configuration as a rank does, in this process."""
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", ERROR_FILE: str(logs / "rank-0.error.json"), **env})
    train.run(argparse.Namespace(config=str(config), overrides=[]))


def test_a_dataset_that_was_cut_short_is_a_fault_of_the_data(tmp_path: Path) -> None:
    """The launcher has found it whole; a restart does not."""
    write_dataset(tmp_path / "d", [100, 100])
    data = {"data__train": str(tmp_path / "d"), "data__mock": False, "data__split": [1.0, 0.0]}
    config = job_config(tmp_path, GPT | {"vocab_size": VOCABULARY}, **data)
    os.truncate(tmp_path / "d.bin", 100)
    with pytest.raises(DataError, match=r"d\.bin has 100 bytes, its index says"):
        start_rank(config, tmp_path, **{STORE_VARIABLE: "127.0.0.1:1"})
    record = json.loads((tmp_path / "rank-0.error.json").read_text())
    assert record["exit_status"] == 3
    finding = classify_ends({0: describe_end(0, 3, record["time"], tmp_path / "rank-0.error.json")}, {0: "n0"})
    assert finding.class_ == "data" and finding.permanent
    assert f"{tmp_path}/d.bin has 100 bytes" in finding.what
    assert finding.hint == "fix the data, then launch the job once more"
    del os.environ[STORE_VARIABLE]
    with pytest.raises(ConfigError):  # nobody has looked at the dataset before
        start_rank(config, tmp_path)


def test_the_launcher_refuses_what_its_smallest_layout_does_not_allow(tmp_path: Path) -> None:
    """Before it starts ranks: four, for the experts."""
    experts = {"experts": 4, "bias": False}
    config = job_config(tmp_path, GPT | experts, parallel__ep=4, batch__global=6)
    with pytest.raises(ConfigError, match=r"6 is not divisible by micro x dp = \d x 4"):
        train.run(argparse.Namespace(config=str(config), overrides=[]))


@pytest.mark.parametrize(
    ("name", "kind", "status"),
    [(TOKEN, "CheckpointError", Exit.CHECKPOINT), ("metrics.jsonl", "PathError", Exit.CONFIG)],
)
def test_rank_0_of_torchrun_says_whatever_keeps_it_from_the_runs_folder(
    name: str, kind: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To torchrun, and to the ranks of other hosts, which would wait."""
    announced: list[MegascaleError] = []
    monkeypatch.setattr(train, "announce_failed_start", lambda error, *_: announced.append(error))
    (tmp_path / "runs" / "test").mkdir(parents=True)
    (tmp_path / "runs" / "test" / name).symlink_to(name)  # a loop
    with pytest.raises(MegascaleError) as failed:
        start_rank(job_config(tmp_path, GPT, checkpoint__resume="never"), tmp_path)
    record = json.loads((tmp_path / "rank-0.error.json").read_text())
    assert (record["kind"], record["exit_status"], record["what"]) == (kind, status, str(failed.value))
    assert announced == [failed.value]
