"""A loss or gradient that is not finite: step, rank and parameter are named, and nothing is updated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import Exit
from megascale.core.rank import Rank
from tests.jobs import Job, job_config
from tests.runs import GPT, LLAMA, build_run, config_of, settings
from tests.worlds import run_world


def diverge(rank: Rank, config: Any, where: int, what: str) -> tuple[str, bool]:
    """Train two steps, then a third in which something is wrong on rank `where`. Returns the error's text, and whether
    weights and optimizer state are what they were before that step.
    """
    import torch

    from megascale.core.errors import DivergenceError
    from megascale.train.step import train_step

    run = build_run(rank, config)
    for _ in range(2):
        train_step(run, run.train.batch(run.progress.samples))
    run.gradients.finish_gather()
    if rank.rank == where:
        block = next(stage.layers["2"] for stage in run.stages if "2" in stage.layers)
        if what == "weight":
            block.mlp.down.weight.data[0, 0] = math.nan
        elif what == "loss":
            block.mlp.register_forward_hook(lambda module, x, out: out * math.inf)
        else:
            block.mlp.register_forward_hook(lambda module, x, out: out.register_hook(lambda g: g * math.nan) and None)
    kept = [t.clone() for s in run.optimizer.shards for t in (s.bucket.weights, s.master, *s.state.values())]
    try:
        train_step(run, run.train.batch(run.progress.samples))
    except DivergenceError as error:
        now = [t for s in run.optimizer.shards for t in (s.bucket.weights, s.master, *s.state.values())]
        same = all(torch.equal(a, b) for a, b in zip(kept, now, strict=True) if a.isfinite().all())
        return str(error), same and run.progress.step == 2
    return "no error", False


LAYOUTS = [
    {"parallel__dp": 4, "parallel__zero": 0},
    {"parallel__dp": 4, "parallel__zero": 1},
    {"parallel__dp": 4, "parallel__zero": 2},
    {"parallel__tp": 2, "parallel__dp": 2},
    {"parallel__pp": 2, "parallel__dp": 2},
    {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2},
]


@pytest.mark.parametrize("what", ["weight", "loss", "gradient"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(f"{k[10:]}{v}" for k, v in layout.items()))
def test_named_and_not_updated(layout: dict[str, Any], what: str, tmp_path: Path) -> None:
    config = config_of(settings(LLAMA, tmp_path, train__precision="fp32", **layout), tmp_path)
    culprit = 3  # holds layer 2 in every layout
    results = run_world(config.world, diverge, config, culprit, what)
    texts = {text for text, _ in results}
    assert len(texts) == 1, "all ranks say the same"
    (text,) = texts
    assert all(unchanged for _, unchanged in results)
    assert text.startswith("step 3: ") and "nothing was updated or saved" in text
    same_tp = {2, 3} if layout.get("parallel__tp", 1) > 1 else {3}  # tp ranks share what went wrong with one of them
    if what == "weight":
        assert "layers.2.mlp.down.weight has a weight that is not finite on rank 3" in text
    elif what == "gradient":
        assert any(f"gradient of layers.2.mlp.down.weight on rank {rank}" in text for rank in same_tp)
    else:
        assert "the loss is nan" in text or "the loss is inf" in text
        if layout.get("parallel__pp", 1) == 1:
            assert any(f"on rank {rank} (" in text for rank in same_tp)


def test_a_job_that_diverges_is_not_requeued(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, megascale.catalog.decays as d\nd.constant = lambda *a: 1e30 if a[0] > 4 else 1.0\n"
    )
    run = {"train__steps": 40, "optimizer__decay": "constant", "checkpoint__every": 3, "parallel__dp": 2}
    config = job_config(tmp_path, GPT, train__precision="fp32", **run)
    job = Job(config, env={"PYTHONPATH": str(site)})
    status, _, err = job.end()
    assert status == Exit.DO_NOT_REQUEUE, err
    step = job.steps()[-1]["step"] + 1
    assert f"step {step}: " in err and "Traceback" not in err
    saved = sorted(path.name for path in (job.folder / "checkpoints").iterdir())
    assert saved == [f"step-{s:08d}" for s in range(3, step, 3)]
