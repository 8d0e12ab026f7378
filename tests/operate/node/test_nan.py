"""A run that becomes NaN ends with status 93 under every launcher, and no step of it is saved or reported."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megascale.cli.main import main
from megascale.core.errors import Exit
from tests.jobs import Job, job_config
from tests.operate.driver.launched import LaunchedJob
from tests.operate.node.test_torchrun import Torchrun
from tests.runs import GPT

ONE_LAYER = GPT | {"num_layers": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [(Job, 1), (Job, 2), (Torchrun, 1), (Torchrun, 2)],
    ids=["one process", "local", "torchrun, one rank", "torchrun"],
)
def test_a_run_that_becomes_nan_is_never_a_success(launcher: type[Job], ranks: int, tmp_path: Path) -> None:
    run = {"train__steps": 6, "checkpoint__every": 1, "parallel__dp": ranks, "train__precision": "fp32"}
    config = job_config(tmp_path, ONE_LAYER, **run, fault__inject=f"nan rank={ranks - 1} step=4")
    job = launcher(config)
    status, _, err = job.end()
    assert status == Exit.DO_NOT_REQUEUE, err
    assert "step 4: " in err and f"has a weight that is not finite on rank {ranks - 1}" in err
    assert "nothing was updated or saved" in err
    assert [record["step"] for record in job.steps()] == [1, 2, 3]
    saved = sorted(path.name for path in (job.folder / "checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in (1, 2, 3)]


@pytest.mark.parametrize(
    ("start", "ranks"),
    [
        pytest.param(Job, 1, id="one process"),
        pytest.param(lambda config: LaunchedJob(config, "--nodes", "2"), 2, id="launch", marks=pytest.mark.slow),
    ],
)
def test_copies_that_stay_after_93_are_told_of_and_removable(
    start: Callable[[Path], Job], ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    run = {"train__steps": 6, "checkpoint__every": 1000, "checkpoint__in_memory_every": 1, "train__precision": "fp32"}
    run |= {"checkpoint__in_memory_dir": str(memory), "parallel__dp": ranks}
    job = start(job_config(tmp_path, ONE_LAYER, **run, fault__inject=f"nan rank={ranks - 1} step=4"))
    status, out, err = job.end()
    assert status == Exit.DO_NOT_REQUEUE, err
    told = re.findall(r"copies of the state stay in memory.*, here in (.*): `megascale (.*)` on each host", out + err)
    assert len(told) == 1, out + err
    places, command = told[0]
    found = re.findall(rf"({memory}/\S+) \(\d+\.\d\d [KM]iB\)", places)
    assert len(found) == ranks and all(len(list(Path(folder).glob("rank-*.?"))) == 2 for folder in found)
    assert main(command.split()) == 0
    assert capsys.readouterr().out.count(": removed") == ranks
    assert list(memory.iterdir()) == []
