"""Overlap benchmark: valid cases, the arithmetic of hidden communication, and a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab import LAB, overlap
from lab.__main__ import main
from lab.commands import schedules
from lab.overlap import CASES, COMMON_SETTINGS, OverlapResult, settings_to_toml, table
from megascale.config.loading import load_config
from megascale.core.errors import Exit
from megascale.core.units import GIB
from megascale.plan.account.memory import JobMemory
from tests.tools.lab.test_testbed import missing


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", ["on", "off", "domino"])
def test_every_case_is_a_run_of_one_rank_a_host(name: str, way: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = tmp_path / "run.toml"
    settings = {"name": '"x"', "train.steps": "3"} | COMMON_SETTINGS | case.settings | case.overlap_settings(way)
    path.write_text(settings_to_toml(settings), encoding="utf-8")
    config = load_config(str(path), [], world_size=case.hosts)
    assert config.world_size == case.hosts
    switched = {axis: getattr(config.overlap, axis) for axis in ("tp", "pp", "dp")}
    value = {"off": False, "domino": "domino" if case.others else True}.get(way, True)
    assert switched == {axis: value if axis in case.axes else True for axis in switched}
    assert case.hosts * JobMemory(config).fullest().total < 4 * GIB


@pytest.mark.parametrize(
    ("name", "way"), [(n, way) for n, (case, _) in schedules.CASES.items() for way in case.schedules]
)
def test_every_job_of_schedules_is_a_run_of_one_rank_a_host(name: str, way: str, tmp_path: Path) -> None:
    case, _ = schedules.CASES[name]
    settings = {"name": '"x"', "train.steps": "3"} | COMMON_SETTINGS | case.settings | case.overlap_settings(way)
    (tmp_path / "run.toml").write_text(settings_to_toml(settings), encoding="utf-8")
    config = load_config(str(tmp_path / "run.toml"), [], world_size=case.hosts)
    assert (config.world_size, config.parallel.schedule) == (case.hosts, way)


def test_the_hidden_share() -> None:
    fast = OverlapResult("dp", rate=1e9, compute=3.0, off=5.0, on=3.5, exposed_off=2.0, exposed_on=0.5)
    assert (fast.communication, fast.ideal, fast.hidden) == (2.0, 3.0, 0.75)
    slow = OverlapResult("dp", rate=1e8, compute=1.0, off=5.0, on=4.0, exposed_off=4.0, exposed_on=3.0)
    assert (slow.communication, slow.ideal, slow.hidden) == (4.0, 4.0, 1.0)
    assert table([fast]).splitlines()[-1] == (
        "| dp | 1,000 | 3.000 | 2.000 | 5.000 | 3.500 | 3.000 | 75% | 2.000, 0.500 |"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["overlap", "--steps", "2"], "the first 2 steps are not timed"),
        (["overlap", "--rounds", "0"], "'0' is not an integer of 1 or more"),
        (["overlap", "--axes", "sp"], "invalid choice: 'sp'"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_an_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["overlap", "--output", str(tmp_path / "file" / "folder")]) == Exit.UNCLASSIFIED
    assert capsys.readouterr().err.startswith(f"--output {tmp_path}/file/folder: Not a directory")


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_it_measures(tmp_path: Path) -> None:
    command = [sys.executable, LAB, "overlap", "--axes", "tp", "--rounds", "1", "--steps", "4"]
    done = subprocess.run(
        [*command, "--json", "--output", str(tmp_path)], capture_output=True, text=True, check=False, timeout=1500
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert result["rate"] > 0 and result["exposed_off"] > result["exposed_on"] > 0
    assert result["off"] > result["compute"] > 0
    assert sorted(path.name for path in (tmp_path / "tp").glob("[!.]*")) == [
        "compute", "compute.toml", "off", "off.toml", "on", "on.toml",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_job_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if missing():
        pytest.skip(missing())
    broken = overlap.OverlapCase("dp", 2, ("dp",), CASES["dp"].settings | {"model.num_heads": "7"})
    with pytest.raises(overlap.OverlapError, match=r"compute\.toml exited with status"):
        overlap.measure_overlap(broken, tmp_path, 1, 3, lambda line: None)
