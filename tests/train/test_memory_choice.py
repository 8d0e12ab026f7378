"""A run with `train.memory = "auto"`: one choice for all ranks, in the log and in the recorded configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError
from megascale.core.rank import Rank
from megascale.plan.account.memory import JobMemory
from megascale.plan.search.memory_policy import MEMORY_FRACTION, with_memory
from tests.runs import LLAMA, config_of, curve_of, settings, write_config
from tests.worlds import run_world

PROFILE = """
[device]
memory = 80e9
bandwidth = 1e12
units = 100
host_bandwidth = 1e12
peak = { fp32 = 1e13 }
[device.attention]
flash2 = { forward = 0.5, backward = 0.5 }
[node]
bandwidth = 1e11
latency = 1e-6
[network]
bandwidth = 1e11
latency = 1e-6
"""


def profiled(home: Path) -> Path:
    """Write a profile of this machine under a folder of configurations."""
    path = home / "megascale" / "hardware" / "this.toml"
    path.parent.mkdir(parents=True)
    path.write_text(PROFILE)
    return home


def tight(tmp_path: Path, **more: object) -> dict:
    """Return settings with a limit between the least memory and the most."""
    keys = {"train__precision": "fp32", "model__seq_length": 512, "batch__global": 2} | more
    tree = settings(LLAMA, tmp_path, **keys)
    most, least = (
        JobMemory(config_of(tree | {"train": tree["train"] | {"memory": [policy]}}, tmp_path)).fullest().total
        for policy in ("keep", "full")
    )
    tree["train"] |= {"memory": "auto", "memory_limit": int((most + least) / 2 / MEMORY_FRACTION)}
    return tree


def trained(rank: Rank, config: RunConfig, home: str) -> Any:
    """Choose on a rank, of which the first alone has a profile, and train; return `[train]` and the losses and norms,
    and those of a run that keeps all. Without a choice, return the error.
    """
    from megascale.device import detect_device
    from megascale.train.build import build_mesh, build_rank_run
    from megascale.train.memory_choice import with_chosen_memory
    from megascale.train.stop import StopRequest

    os.environ["XDG_CONFIG_HOME"] = home if rank.rank == 0 else f"{home}/none"
    device = detect_device(rank.local_rank, allow_gpu=False)
    mesh = build_mesh(config, rank, device)
    try:
        chosen = with_chosen_memory(config, device, mesh)
    except ConfigError as error:
        return str(error)
    kept = config.model_copy(update={"train": with_memory(config.train, ["keep"])})
    return chosen.train, *(curve_of(build_rank_run(each, mesh, device, StopRequest()), 2) for each in (chosen, kept))


def test_all_ranks_train_with_the_choice_of_rank_0(tmp_path: Path) -> None:
    """The losses and norms are bit for bit those of a run that keeps all, within a limit that it exceeds."""
    config = config_of(tight(tmp_path, parallel__dp=2), tmp_path)
    (first, losses, kept), (second, *_) = run_world(2, trained, config, str(profiled(tmp_path / "home")))
    assert first == second
    assert len(first.memory) == 4
    assert {"keep"} < {str(policy) for policy in first.memory}
    assert JobMemory(config.model_copy(update={"train": first})).fullest().total <= config.train.memory_limit
    assert losses == kept


def test_a_machine_without_a_profile_is_told_to_measure_it(tmp_path: Path) -> None:
    (text,) = run_world(1, trained, config_of(tight(tmp_path), tmp_path), str(tmp_path / "none"))
    assert "train.memory: auto needs the planner's times" in text
    assert "`megascale bench profile` measures it" in text


@pytest.mark.slow
def test_the_choice_is_logged_and_recorded(tmp_path: Path) -> None:
    path = write_config(tight(tmp_path, train__steps=3), tmp_path / "auto.toml")
    environment = os.environ | {"XDG_CONFIG_HOME": str(profiled(tmp_path / "home"))}
    command = [sys.executable, "-m", "megascale", "train", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "train.memory: layers 0" in done.stdout
    recorded = load_config(str(tmp_path / "test" / "config.toml"))
    assert isinstance(recorded.train.memory, list) and len(recorded.train.memory) == 4
