"""A run saves what was predicted for it, or why there is no prediction, and never waits for it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from megascale.core.rank import Rank
from megascale.train import plan_record
from megascale.train.plan_record import PlanRecord, profile_of
from tests.runs import LLAMA, build_run, config_of, settings

GIB = 2**30


def test_profiles_by_device_and_memory() -> None:
    assert profile_of("NVIDIA H100 80GB HBM3", 79 * GIB) == "h100"
    assert profile_of("NVIDIA A100-SXM4-40GB", 39 * GIB) == "a100-40g"
    assert profile_of("NVIDIA A100-SXM4-80GB", 79 * GIB) == "a100-80g"
    assert profile_of("NVIDIA T4", 15 * GIB) is None


@pytest.fixture(autouse=True)
def same_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan beside other programs, too: on a busy machine the lowest priority may get no core for minutes."""
    monkeypatch.setattr(plan_record, "LOWEST_PRIORITY", 0)


def planned(folder: Path) -> dict[str, Any]:
    """Start a run's hook on this machine, and return the plan that it saves."""
    from megascale.config.toml_writer import to_toml

    config = config_of(settings(LLAMA, folder, train__precision="fp32"), folder)
    config.folder.mkdir(parents=True)
    (config.folder / "config.toml").write_text(to_toml(config))
    run = build_run(Rank(0, 1, 0, "here"), config)
    hook = PlanRecord()
    hook.run_begins(run)
    for thread in [thread for thread in threading.enumerate() if thread.name == "plan"]:
        thread.join()
    hook.run_ends(run)
    result: dict[str, Any] = json.loads((config.folder / "plan.json").read_text())
    return result


def test_an_unknown_machine_has_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    assert "bench profile" in planned(tmp_path)["reason"]


def test_a_home_folder_that_cannot_be_looked_up_is_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", "/" + "x" * 300)
    assert "bench profile" in planned(tmp_path)["reason"]


def test_a_known_machine_has_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    profile = tmp_path / "config" / "megascale" / "hardware" / "this.toml"
    profile.parent.mkdir(parents=True)
    profile.write_text(Path("configs/hardware/v100.toml").read_text())
    plan = planned(tmp_path)
    assert plan["step_time_s"] > 0
    assert plan["causes_s"]["gemm"] > 0
    assert sum(plan["causes_s"].values()) == pytest.approx(plan["step_time_s"])


def test_a_plan_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    profile = tmp_path / "config" / "megascale" / "hardware" / "this.toml"
    profile.parent.mkdir(parents=True)
    profile.write_text("[device]\n")
    assert str(profile) in planned(tmp_path)["reason"]
