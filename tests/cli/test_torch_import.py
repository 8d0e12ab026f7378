"""torch's own variables are checked like the others: one line, status 2, from every command and every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.cli.torch_import import torch_import_problem
from megascale.core.errors import Exit
from tests.jobs import job_config
from tests.runs import GPT


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"TORCH_LOGS": "nonsense"}, "Invalid log settings: nonsense, must be a comma separated list"),
        pytest.param(
            {"TORCH_LOGS": "+dynamo", "TORCH_LOGS_OUT": "/none/x"},
            "No such file or directory: '/none/x'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_bad_variable_is_named_in_one_line(variables: dict[str, str], words: str) -> None:
    command = [sys.executable, "-m", "megascale", "doctor"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.CONFIG
    first, last = done.stderr.splitlines()
    assert first.startswith("environment  torch cannot be imported: ") and words in first
    assert first.endswith(f"  -> correct or unset {', '.join(variables)}")
    assert last == "1 problem"


def test_a_sample_of_no_folder_is_refused_before_torch_is_imported() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "megascale", "sample", "runs/nope"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.CONFIG
    assert done.stderr.splitlines()[-1].startswith("runs/nope: no such folder")
    assert not any(line.split("|")[-1].strip() == "torch" for line in done.stderr.splitlines())


def test_ranks_report_it_to_their_launcher(tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, parallel__tp=2)
    command = [sys.executable, "-m", "megascale", "train", str(config)]
    env = os.environ | {"TORCH_LOGS": "nonsense"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.CONFIG, done.stderr
    said = done.stderr.count("torch cannot be imported: Invalid log settings")
    assert said == 1 + done.stderr.count("megascale: rank 1 of 2"), done.stderr  # either rank may be the first to fail
    assert "Traceback" not in done.stderr and "no error" not in done.stderr


def test_other_errors_are_not_torchs() -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        import no_such_module_at_all  # type: ignore[import-not-found]  # noqa: F401
    assert torch_import_problem(raised.value) is None
