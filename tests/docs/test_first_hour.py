"""The commands of docs/first-hour.md, as they stand, from text to Hugging Face weights and back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the page's blocks in their order in a folder like a fresh clone; return the folder and the output."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "docs", "tools"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    install, *blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    assert install == "make install\n"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = ["bash", "-eu", "-c", "".join(blocks)]
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return folder, ended.stdout


def records(folder: Path, run: str) -> list[Mapping[str, Any]]:
    lines = (folder / "runs" / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_run_is_stopped_and_resumed(done: tuple[Path, str]) -> None:
    folder, out = done
    assert "status 143" in out
    assert len(re.findall(r"^resumed from \S+/runs/mine/checkpoints/step-", out, re.MULTILINE)) == 3
    assert (folder / "mine/later/step-00000040/manifest.json").is_file()


def test_a_branch_and_a_run_that_goes_back_repeat_the_steps(done: tuple[Path, str]) -> None:
    folder, _ = done
    mine, branch = (
        [(each["step"], each["loss"]) for each in records(folder, run) if "loss" in each] for run in ("mine", "branch")
    )
    assert mine[-len(branch) :] == branch and branch[-1][0] == 40


def test_the_line_that_is_shown_is_of_the_form_that_is_printed(done: tuple[Path, str]) -> None:
    def form(line: str) -> str:
        return re.sub(r"\d+(?:[.,]\d+)*(?:e[+-]\d+)?", "#", line).replace("#k tok", "# tok").strip()

    (shown,) = re.findall(r"^step 20/40.*$", PAGE, re.MULTILINE)
    assert form(shown) in {form(line) for line in done[1].splitlines() if line.startswith("step 20/40")}


def test_the_keys_that_are_explained_are_in_the_metrics(done: tuple[Path, str]) -> None:
    folder, _ = done
    table = PAGE.partition("## 5. ")[2].partition("## 6. ")[0]
    keys = {key for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    steps = [record for record in records(folder, "mine") if "loss" in record]
    assert len(keys) > 5 and all(keys <= record.keys() for record in steps)


def test_exported_weights_train_on(done: tuple[Path, str]) -> None:
    folder, out = done
    assert "resumed" not in out[out.rindex("back: ") :]
    losses = [record["loss"] for record in records(folder, "back") if "loss" in record]
    first = next(record["loss"] for record in records(folder, "mine") if "loss" in record)
    assert losses[0] < first - 1, "the run begins with the exported weights"
