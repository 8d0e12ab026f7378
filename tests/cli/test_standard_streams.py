"""Standard streams that are closed, or whose disk is full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.core.errors import Exit
from tests.jobs import job_config
from tests.runs import GPT

MEGASCALE = f"{sys.executable} -m megascale"
ENV = dict(os.environ, OMP_NUM_THREADS="1")
LAYOUTS = [{}, pytest.param({"parallel__tp": 2}, marks=pytest.mark.slow)]


def run(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=ENV, timeout=300, check=False)


def test_a_full_disk_is_said_in_a_line(tmp_path: Path) -> None:
    ended = run(f"{MEGASCALE} check {job_config(tmp_path, GPT)} > /dev/full")
    assert ended.returncode == Exit.UNCLASSIFIED
    assert ended.stderr == "megascale: the output cannot be written: No space left on device\n"


def test_closed_streams_are_the_null_device(tmp_path: Path) -> None:
    """The first file to be opened would be what `print` writes to."""
    code = "import os, megascale.cli.main as m; m.COMMANDS.clear(); m.open_closed_streams(); "
    code += f"file = os.open({str(tmp_path / 'file')!r}, os.O_CREAT | os.O_RDWR); print('lost'); os.write(2, b'lost'); "
    code += "raise SystemExit(0 if file > 2 else 5)"
    assert run(f'{sys.executable} -c "{code}" <&- >&- 2>&-').returncode == Exit.OK
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("layout", LAYOUTS, ids=["alone", "launcher"])
@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", pytest.param("> /dev/full 2>&1", marks=pytest.mark.slow)])
def test_training_goes_on_without_its_output(streams: str, layout: dict, tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **layout, train__steps=3)
    assert run(f"{MEGASCALE} train {config} {streams}").returncode == Exit.OK
    assert (tmp_path / "runs" / "test" / "metrics.jsonl").read_text().count('"loss"') == 3
