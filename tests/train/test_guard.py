"""A loss or gradient that is not finite: step, rank and parameter are named, and nothing is updated."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megascale.config.model import ModelConfig
from megascale.core.errors import Exit
from megascale.core.rank import Rank
from megascale.train.guard import Report, _verdict
from tests.jobs import Job, job_config
from tests.marks import only_quick
from tests.runs import GPT, LLAMA, build_run, builds, config_of, settings
from tests.worlds import run_world

WHAT = ("weight", "loss", "gradient", "sum")


def diverge(rank: Rank, config: Any, where: int) -> list[tuple[str, bool]]:
    """For each of WHAT: train two steps, then a third in which it is wrong on rank `where`, the sum on all. Returns the
    error's text, and whether weights and optimizer state are what they were before that step.
    """
    found = []
    for what, run in zip(WHAT, builds(rank, [config] * len(WHAT)), strict=True):
        train_two_steps(run)
        if rank.rank == where or what == "sum":
            spoil(run, what)
        found.append(third_step(run))
    return found


def train_two_steps(run: Any) -> None:
    from megascale.train.step import train_step

    for _ in range(2):
        train_step(run, run.train.batch(run.progress.samples))
    run.gradients.finish_gather()


def spoil(run: Any, what: str) -> None:
    """Let a weight, the output or the gradient of layer 2's MLP be wrong from now on; or the loss, and nothing else."""
    import torch

    if what == "sum":
        run.pipeline.scalar = lambda value: torch.full((), value + (math.inf if value == 0 else 0))
        return
    mlp = next(stage.layers["2"] for stage in run.stages if "2" in stage.layers).mlp
    if what == "weight":
        mlp.down.weight.data[0, 0] = math.nan
    elif what == "loss":
        mlp.register_forward_hook(lambda module, x, out: out * math.inf)
    else:
        mlp.register_forward_hook(lambda module, x, out: out.register_hook(lambda g: g * math.nan) and None)


def state(run: Any) -> list[Any]:
    return [t.clone() for s in run.optimizer.shards for t in (s.bucket.weights, s.master, *s.state.values())]


def third_step(run: Any) -> tuple[str, bool]:
    import torch

    from megascale.core.errors import DivergenceError
    from megascale.train.step import train_step

    before = state(run)
    try:
        train_step(run, run.train.batch(run.progress.samples))
        text = ""
    except DivergenceError as error:
        text = str(error)
    run.gradients.finish_gather()
    # a weight that was NaN before is NaN still
    same = all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, state(run), strict=True))
    return text, same and run.progress.step == 2


LAYOUTS = [
    {"parallel__dp": 4, "parallel__zero": 0},
    {"parallel__dp": 4, "parallel__zero": 1},
    {"parallel__dp": 4, "parallel__zero": 2},
    {"parallel__tp": 2, "parallel__dp": 2},
    {"parallel__pp": 2, "parallel__dp": 2},
    {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2},
    {"optimizer__name": "lamb", "parallel__tp": 2, "parallel__dp": 2},
]


@pytest.mark.parametrize(
    "layout",
    only_quick(LAYOUTS, LAYOUTS[1], LAYOUTS[-2]),
    ids=lambda layout: " ".join(f"{k[10:]}{v}" for k, v in layout.items()),
)
def test_named_and_not_updated(layout: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(settings(LLAMA, tmp_path, train__precision="fp32", **layout), tmp_path)
    culprit, tp = last_rank_with_layer_2(config), config.parallel.tp
    same_tp = range(culprit // tp * tp, culprit + 1)  # tp ranks share what went wrong with one of them
    ranks = run_world(config.world, diverge, config, culprit)
    texts = {}
    for index, what in enumerate(WHAT):
        said = {rank[index][0] for rank in ranks}
        assert len(said) == 1, "all ranks say the same"
        assert all(rank[index][1] for rank in ranks), "some rank updated something"
        texts[what] = said.pop()
        assert texts[what].startswith("step 3: ") and "nothing was updated or saved" in texts[what]
    assert f"layers.2.mlp.down.weight has a weight that is not finite on rank {culprit} (" in texts["weight"]
    assert any(f"gradient of layers.2.mlp.down.weight on rank {rank} (" in texts["gradient"] for rank in same_tp)
    assert "the loss is inf on rank 0 (" in texts["sum"], "though all gradients are finite"
    assert "the loss is nan" in texts["loss"] or "the loss is inf" in texts["loss"]
    if config.parallel.pp == 1:
        assert any(f"on rank {rank} (" in texts["loss"] for rank in same_tp)


def test_a_tied_embedding_does_not_hide_where_a_gradient_began(tmp_path: Path) -> None:
    """It is first and last in the network, and whatever goes wrong reaches it."""
    config = config_of(settings(GPT, tmp_path, train__precision="fp32", parallel__pp=2), tmp_path)
    for rank in run_world(2, diverge, config, last_rank_with_layer_2(config)):
        assert "the gradient of layers.2.mlp.down.bias on rank 1 (" in rank[WHAT.index("gradient")][0]


def overlooked(rank: Rank, config: Any) -> list[tuple[str, bool]]:
    """A third step with a gradient that is not finite, without the guard, and then without the optimizer's own."""
    import torch

    from megascale.train import step

    run = build_run(rank, config)
    train_two_steps(run)
    step.check_finite = lambda *arguments: None
    found, clipping = [], run.optimizer.clipping
    for unplugged in (False, True):
        if unplugged:
            run.optimizer.clipping = lambda *a, **k: replace(clipping(*a, **k), skip=torch.zeros(()))
        spoil(run, "gradient")
        text, same = third_step(run)
        found.append((text, same or all(t.isfinite().all() for t in state(run))))
    return found


def test_without_the_guards_the_step_would_spoil_the_weights(tmp_path: Path) -> None:
    config = config_of(settings(LLAMA, tmp_path, train__precision="fp32"), tmp_path)
    assert run_world(1, overlooked, config) == [[("", True), ("", False)]]


def isolated(rank: Rank, configs: list[Any]) -> list[list[str]]:
    """For each run, and for two weights that lie in the shards of the two ranks: the error's text if one number of the
    weight's gradient is not finite on rank 1, and nothing else, by each way in which gradients travel.
    """
    from tests.runs import send_messages

    found: list[list[str]] = []
    for number, run in enumerate(builds(rank, [config for config in configs for _ in range(3)])):
        dp, way = run.mesh.dp, number % 3
        if number == 0:
            shared = dp.exchange, dp.transport
        dp.exchange, dp.transport = shared
        if way:
            send_messages(dp, backend=way == 2)
        train_two_steps(run)
        texts = []
        for name in ISOLATED:
            (bucket,) = run.gradients.buckets
            (slot,) = [slot for slot in bucket.layout.slots if slot.parameter.name == name]
            assert (slot.stop <= bucket.layout.size // 2) is (name == ISOLATED[0]), "each in another shard"
            reduce = bucket.reduce

            def spoilt(name: str = name, bucket: Any = bucket, reduce: Any = reduce) -> None:
                if rank.rank == 1:
                    bucket.parameters[name].main_grad[0, 0] = math.nan
                reduce()

            bucket.reduce = spoilt
            texts.append(third_step(run)[0])
            bucket.reduce = reduce
        found.append(texts)
    return found


ISOLATED = ("layers.0.attention.qkv.weight", "layers.3.mlp.down.weight")


def test_a_weights_gradient_alone_is_found(tmp_path: Path) -> None:
    """With zero = 2 nobody knows whose it was."""
    layouts = [{"parallel__dp": 2, "parallel__zero": zero} for zero in (0, 1, 2)]
    configs = [config_of(settings(LLAMA, tmp_path, train__precision="fp32", **layout), tmp_path) for layout in layouts]
    ranks = run_world(2, isolated, configs)
    assert ranks[0] == ranks[1]
    for zero, texts in zip((0, 1, 2), (ranks[0][n : n + 3] for n in (0, 3, 6)), strict=True):
        for each in texts:
            for name, text in zip(ISOLATED, each, strict=True):
                where = "on rank 1 (" if zero < 2 else "on rank 0 ("
                assert f"the gradient of {name} {where}" in text and ("and 1 more" in text) == (zero == 2)


def report(rank: int, place: tuple[int, int], gradients: dict[str, int], spoilt: set[int]) -> Report:
    return Report(rank, "host", place, 1.0, [], gradients, spoilt)


def test_every_rank_that_may_have_spoilt_a_sum_is_counted() -> None:
    """Shards of a sum show what is wrong, not whose it was: any rank that was wrong before the sum may be it."""
    shard = {"layers.1.mlp.down.weight": 0, "layers.1.attention.qkv.weight": 0}
    reports = [
        report(0, (0, 0), {}, set()),
        report(1, (0, 0), shard, set()),
        report(2, (0, 0), {}, {0}),
        report(3, (0, 0), {}, {0}),
        report(4, (1, 0), {}, {0}),  # another place, whose first bucket is another
    ]
    name = "the gradient of layers.1.mlp.down.weight on rank"
    assert _verdict(reports, ModelConfig(**GPT)) == f"{name} 2 (host) and 1 more is not finite"
    assert _verdict(reports[:2], ModelConfig(**GPT)) == f"{name} 1 (host) is not finite"
    assert _verdict(reports[:1], ModelConfig(**GPT)) == "the sum of all gradients is not finite"
    blind = [replace(each, spoilt=set(), blind=True) for each in reports]
    assert _verdict(blind, ModelConfig(**GPT)) == f"{name} 0 (host) and 3 more is not finite", "all of the place"


def last_rank_with_layer_2(config: Any) -> int:
    from megascale.layout.chunks import stages_of
    from megascale.layout.topology import topology_of

    stages, topology = stages_of(config), topology_of(config)
    holder = next(stage % topology.pp for stage in range(stages.count) if 2 in stages.layers(stage))
    return max(rank for rank in range(config.world) if topology.coord(rank).pp == holder)


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


def save_spoilt(rank: Rank, config: Any, which: str) -> str:
    """Spoil one number of rank 1's state after a step, and go to save."""
    from megascale.core.errors import DivergenceError
    from megascale.train.guard import check_state

    run = build_run(rank, config)
    train_two_steps(run)
    check_state(run)
    if rank.rank == 1:
        shard = run.optimizer.shards[-1]
        (shard.master if which == "master" else shard.state[which])[0] = math.inf
    try:
        check_state(run)
    except DivergenceError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("which", ["master", "exp_avg", "exp_avg_sq"])
def test_a_state_that_is_not_finite_is_not_saved(which: str, tmp_path: Path) -> None:
    config = config_of(settings(LLAMA, tmp_path, train__precision="bf16", parallel__dp=2), tmp_path)
    first, second = run_world(2, save_spoilt, config, which)
    assert first == second
    assert re.match(r"step 2: \S+ or its optimizer state is not finite on rank 1; it was not saved", first)


@pytest.mark.slow
def test_a_step_that_spoils_the_weights_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    run: dict[str, Any] = {"train__steps": 6, "checkpoint__every": 1, "parallel__dp": 2}
    run |= {"optimizer__decay": "constant", "optimizer__warmup_steps": 0}
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import megascale.catalog.decays as d\nd.constant = lambda *a: 1e300 if a[0] > 3 else 1.0\n"
    )
    job = Job(job_config(tmp_path, GPT, train__precision="fp32", **run), env={"PYTHONPATH": str(site)})
    status, _, err = job.end()
    assert status == Exit.DO_NOT_REQUEUE, err
    assert "step 4: " in err and "not saved" in err
    saved = sorted(path.name for path in (job.folder / "checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in (1, 2, 3)]
