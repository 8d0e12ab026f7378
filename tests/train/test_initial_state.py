"""The state that a run begins with: values that are not finite are named, and hints say no more than is known."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megascale.core.errors import CheckpointError, Exit
from megascale.core.rank import Rank
from megascale.train.finite_check import known_state
from megascale.train.run import InitialState
from tests.jobs import Job, job_config
from tests.runs import LLAMA, config_of, settings
from tests.worlds import run_world

BAD = "layers.1.mlp.up.weight"


class Foreign:
    """Weights of another project, with one value that is not finite."""

    def __init__(self, model: Any, bad: float) -> None:
        self.folder, self.model, self._bad = Path("elsewhere"), model, bad

    def check_tensors(self) -> None:
        pass

    def leave_out_depths(self, kept: int) -> int:
        return 0

    def place_of(self, name: str) -> str:
        return f"elsewhere/model.safetensors: theirs.{name}"

    def read_tensor(self, name: str, part: Any) -> Any:
        import torch

        offset, size = part
        values = torch.full(size, 0.01, dtype=torch.float64)
        if name == BAD and offset[0] + size[0] > 40:  # on the second tp rank alone
            values[-1].fill_(self._bad)
        return values


def begin(rank: Rank, config: Any, bad: float) -> str:
    """Begin a run with foreign weights; return the error's text."""
    from megascale.core.errors import CheckpointError
    from megascale.train.resume import load_initial_state
    from tests.runs import build_run

    run = build_run(rank, config)
    try:
        load_initial_state(run, lambda folder: Foreign(config.model, bad))
    except CheckpointError as error:
        return str(error)
    return run.origin.name


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 1e300, 0.5])
def test_weights_from_elsewhere_that_are_not_finite_are_named(bad: float, tmp_path: Path) -> None:
    """1e300 is finite in fp64, and infinite in the fp32 of this run."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("{}")
    resume = f"hf:{tmp_path / 'elsewhere'}"
    more = {"parallel__tp": 2, "train__precision": "bf16", "checkpoint__resume": resume}
    texts = run_world(2, begin, config_of(settings(LLAMA, tmp_path, **more), tmp_path), bad)
    assert len(set(texts)) == 1
    if bad == 0.5:
        assert texts[0] == "the weights of elsewhere"
    else:
        place = f"rank 1: elsewhere/model.safetensors: theirs.{BAD} has a value that is not finite in float32"
        assert texts[0].startswith(f"{place}; nothing was trained")


def resume(rank: Rank, config: Any, kind: str) -> str:
    """Save a state with a value that is not finite, which training would refuse to save; return a resume's error."""
    from megascale.train.resume import load_initial_state
    from tests.runs import build_run

    run = build_run(rank, config)
    shard = run.optimizer.shards[0]
    (shard.master if kind == "weights" else shard.state[kind])[3] = math.nan
    run.progress.step = 2
    run.checkpoints.save(run.progress)
    try:
        load_initial_state(build_run(rank, config, run.mesh), lambda folder: pytest.fail("no foreign weights"))
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["weights", "exp_avg"])
def test_a_checkpoint_that_is_not_finite_is_named(kind: str, tmp_path: Path) -> None:
    config = config_of(settings(LLAMA, tmp_path, checkpoint__every=1, train__precision="fp32"), tmp_path)
    (text,) = run_world(1, resume, config, kind)
    assert f"{config.checkpoint_folder}/step-00000002: {kind}." in text and "not finite in float32" in text


@pytest.mark.parametrize(
    ("newest", "origin", "failed", "text"),
    [
        (None, InitialState(), 3, "this run has no checkpoint yet"),
        (
            None,
            InitialState("the weights of w"),
            1,
            "first step from the weights of w, finite itself, but perhaps the cause",
        ),
        (None, InitialState("the weights of w"), 2, "the weights of w and the step after it were finite"),
        (4, InitialState("x", 2), 5, "first step from the checkpoint of step 4, finite itself, but perhaps the cause"),
        (4, InitialState(), 8, "the checkpoint of step 4 and the 3 steps after it were finite"),
        (None, InitialState("the copies in memory", 6), 8, "the copies in memory and the step after it were finite"),
    ],
)
def test_a_hint_says_what_is_known(newest: int | None, origin: InitialState, failed: int, text: str) -> None:
    run: Any = SimpleNamespace(checkpoints=SimpleNamespace(newest_step=newest), origin=origin)
    assert known_state(run, failed).endswith(text)


@pytest.mark.slow
def test_a_checkpoint_whose_next_step_diverges_is_not_called_good(tmp_path: Path) -> None:
    """A learning rate of 1e30 leaves finite weights, and a checkpoint, from which no step is finite at any rate."""
    run = {"checkpoint__every": 1, "train__precision": "fp32", "optimizer__decay": "constant"}
    config = job_config(tmp_path, LLAMA, **run)
    for rate in ("1e30", "1e-3"):
        status, _, err = Job(config, f"optimizer.lr={rate}").end()
        assert status == Exit.DO_NOT_REQUEUE, err
        assert "step 2: " in err and "good" not in err
        assert "this is the first step from the checkpoint of step 1, finite itself, but perhaps the cause" in err
