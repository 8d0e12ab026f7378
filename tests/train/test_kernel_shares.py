"""A profiled step leaves the seconds of its kernels, by which `diagnose --mfu` divides forward and backward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.cli.main import main
from megascale.core.rank import Rank
from megascale.record.layout import Phase
from megascale.train.kernel_shares import KernelShares
from megascale.train.step import train_step
from tests.jobs import Job, job_config
from tests.operate.driver.launched import LaunchedJob, launch_config
from tests.runs import GPT, build_run, config_of, settings

SHORT = {"train__precision": "fp32", "batch__global": 2}


def profiled(folder: Path, step: int) -> dict[str, object] | None:
    """Train for two steps with the hook, and return what it writes."""
    config = config_of(settings(GPT, folder, **SHORT, observe__profile_step=step), folder)
    config.folder.mkdir(parents=True)
    run, hook = build_run(Rank(0, 1, 0, "here"), config), KernelShares()
    for _ in range(2):
        hook.step_begins(run)
        hook.step_ends(run, train_step(run, run.train_loader.batch(run.progress.samples)))
    file = config.folder / "kernels" / "stage-0.json"
    return json.loads(file.read_text()) if file.exists() else None


def test_the_step_is_divided_by_purpose(tmp_path: Path) -> None:
    found = profiled(tmp_path, step=2)
    assert found is not None
    seconds = found["seconds"]
    assert isinstance(seconds, dict)
    assert (found["rank"], found["step"]) == (0, 2)
    assert all(seconds[name] > 0 for name in ("gemm", "attention", "norms", "optimizer"))


def test_a_new_run_removes_the_profile_of_an_earlier_one(tmp_path: Path) -> None:
    assert profiled(tmp_path, step=1) is not None
    config = config_of(settings(GPT, tmp_path, **SHORT), tmp_path)
    KernelShares().run_begins(build_run(Rank(0, 1, 0, "here"), config))
    assert not list((config.folder / "kernels").iterdir())


def test_no_step_is_profiled_by_default(tmp_path: Path) -> None:
    assert profiled(tmp_path, step=0) is None


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "test").mkdir(parents=True)
    config = config_of(settings(GPT, tmp_path, **SHORT, observe__profile_step=1), tmp_path)
    config.folder.mkdir(parents=True, exist_ok=True)
    (config.folder / "kernels").write_text("in the way")
    run, hook = build_run(Rank(0, 1, 0, "here"), config), KernelShares()
    hook.step_begins(run)
    hook.step_ends(run, train_step(run, run.train_loader.batch(run.progress.samples)))
    assert "WARNING: the profile of step 1 is not written" in capsys.readouterr().err


def test_the_profiler_works_in_a_phase_of_its_own_and_is_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver calls it no hang, and what the first profile imports is no part of a step."""
    config = config_of(settings(GPT, tmp_path, **SHORT, observe__profile_step=1), tmp_path)
    config.folder.mkdir(parents=True)
    run, hook, calls = build_run(Rank(0, 1, 0, "here"), config), KernelShares(), list[tuple[str, str]]()
    flight = run.mesh.recorder.log
    for name in ("start", "stop", "export_chrome_trace"):
        original = getattr(torch.profiler.profile, name)

        def note(self: object, *given: object, name: str = name, original: Any = original) -> object:
            calls.append((name, str(flight._phase)))
            return original(self, *given)

        monkeypatch.setattr(torch.profiler.profile, name, note)
    flight.set_phase(Phase.LOAD)
    hook.run_begins(run)
    assert calls == [("start", "load"), ("stop", "load")]
    flight.set_phase(Phase.STEP)
    hook.step_begins(run)
    assert flight._phase == Phase.STEP
    hook.step_ends(run, train_step(run, run.train_loader.batch(run.progress.samples)))
    assert calls[2:] == [(name, "profile") for name in ("start", "stop", "export_chrome_trace")]
    assert flight._phase == Phase.STEP
    hook.run_begins(run)
    assert len(calls) == 5, "once the step is over nothing is warmed"


@pytest.mark.slow
def test_a_profiled_step_is_no_hang_for_a_driver(tmp_path: Path) -> None:
    changes = {"parallel__dp": 2, "train__steps": 12, "observe__profile_step": 6, "fault__hang_s": 4.0}
    job = LaunchedJob(launch_config(tmp_path, **changes), "--nodes", "1")
    status, output, _ = job.end()
    assert status == 0, output
    assert not job.history.incidents
    assert (job.folder / "kernels" / "stage-0.json").exists()


@pytest.mark.slow
def test_a_job_s_mfu_has_gemms_and_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(
        job_config(tmp_path, GPT, parallel__pp=2, train__steps=8, observe__event_store=True, observe__profile_step=4)
    )
    status, _, err = job.end()
    assert status == 0, err
    assert len(list((job.folder / "kernels").iterdir())) == 2
    assert main(["diagnose", str(job.folder), "--mfu"]) == 0
    text = capsys.readouterr().out
    assert "  GEMMs" in text and "profiled" in text
    assert (
        main(
            [
                "events",
                str(job.folder),
                "SELECT DISTINCT step FROM steps WHERE tags LIKE '%profile%' ORDER BY 1",
                "--csv",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.split() == ["step", "4", "5"]
