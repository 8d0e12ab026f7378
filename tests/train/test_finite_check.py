"""A loss or gradient that is not finite: the error names step, rank and parameter, and nothing is updated."""

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
from megascale.train.finite_check import NonFiniteReport, _first_cause
from tests.jobs import Job, job_config
from tests.marks import only_quick
from tests.runs import GPT, LLAMA, build_run, builds, config_of, settings
from tests.worlds import run_world

FAULTS = ("weight", "loss", "gradient", "sum")


def diverge(rank: Rank, config: Any, where: int) -> list[tuple[str, bool]]:
    """For all FAULTS: train two steps, then a third with the fault on rank `where` ("sum": on all ranks). Returns the
    error's text, and True if weights and optimizer state are unchanged.
    """
    results = []
    for fault, run in zip(FAULTS, builds(rank, [config] * len(FAULTS)), strict=True):
        train_two_steps(run)
        if rank.rank == where or fault == "sum":
            inject(run, fault)
        results.append(third_step(run))
    return results


def train_two_steps(run: Any) -> None:
    from megascale.train.step import train_step

    for _ in range(2):
        train_step(run, run.train_loader.batch(run.progress.samples))
    run.buffers.finish_param_gather()


def inject(run: Any, fault: str) -> None:
    """Make a weight of layer 2's MLP, the layer's output or its gradient non-finite; for "sum", only the loss."""
    import torch

    if fault == "sum":
        run.pipeline.loss_scalar = lambda value: torch.full((), value + (math.inf if value == 0 else 0))
        return
    layer = next(stage.layers["2"] for stage in run.stages if "2" in stage.layers)
    if fault == "weight":
        layer.mlp.down.weight.data[0, 0] = math.nan
    elif fault == "loss":
        layer.register_forward_hook(lambda module, x, out: out * math.inf)
    else:
        layer.register_forward_hook(lambda module, x, out: out.register_hook(lambda g: g * math.nan) and None)


def state(run: Any) -> list[Any]:
    return [t.clone() for s in run.optimizer.shards for t in (s.bucket.weights, s.master, *s.state.values())]


def third_step(run: Any) -> tuple[str, bool]:
    import torch

    from megascale.core.errors import DivergenceError
    from megascale.train.step import train_step

    before = state(run)
    try:
        train_step(run, run.train_loader.batch(run.progress.samples))
        text = ""
    except DivergenceError as error:
        text = str(error)
    run.buffers.finish_param_gather()
    # NaN equals NaN here: an injected weight stays
    unchanged = all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, state(run), strict=True))
    return text, unchanged and run.progress.step == 2


LAYOUTS = [
    {"parallel__dp": 4, "parallel__zero": 0},
    {"parallel__dp": 4, "parallel__zero": 1},
    {"parallel__dp": 4, "parallel__zero": 2},
    {"parallel__dp": 4, "parallel__zero": 1, "parallel__grad_reduce": "fp8"},
    {"parallel__dp": 4, "parallel__zero": 2, "parallel__grad_reduce": "fp8"},
    {"parallel__tp": 2, "parallel__dp": 2},
    {"parallel__pp": 2, "parallel__dp": 2},
    {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2},
    {"optimizer__name": "lamb", "parallel__tp": 2, "parallel__dp": 2},
    {"parallel__dp": 2},
]


@pytest.mark.parametrize(
    "layout",
    only_quick(LAYOUTS, LAYOUTS[3], LAYOUTS[7], LAYOUTS[-1]),
    ids=lambda layout: " ".join(f"{k[10:]}{v}" for k, v in layout.items()),
)
def test_the_error_names_the_fault_and_nothing_is_updated(layout: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(settings(LLAMA, tmp_path, train__precision="fp32", batch__global=4, **layout), tmp_path)
    culprit, tp = last_rank_with_layer_2(config), config.parallel.tp
    same_tp = range(culprit // tp * tp, culprit + 1)  # a fault on one tp rank reaches the others
    ranks = run_world(config.world_size, diverge, config, culprit)
    texts = {}
    for index, fault in enumerate(FAULTS):
        messages = {rank[index][0] for rank in ranks}
        assert len(messages) == 1, "all ranks raise the same error"
        assert all(rank[index][1] for rank in ranks), "a rank was updated"
        texts[fault] = messages.pop()
        assert texts[fault].startswith("step 3: ") and "nothing was updated or saved" in texts[fault]
    assert f"layers.2.mlp.down.weight has a weight that is not finite on rank {culprit} (" in texts["weight"]
    assert any(f"gradient of layers.2.mlp.down.weight on rank {rank} (" in texts["gradient"] for rank in same_tp)
    assert "the loss is inf on rank 0 (" in texts["sum"], "though all gradients are finite"
    assert "the loss is nan" in texts["loss"] or "the loss is inf" in texts["loss"]
    if config.parallel.pp == 1:
        assert any(f"on rank {rank} (" in texts["loss"] for rank in same_tp)


def diverge_with_shards(rank: Rank, config: Any) -> list[str]:
    """Errors of a step with a weight that is not finite in the shard of rank 1, and of one with such a gradient."""
    texts = []
    for fault, run in zip(("weight", "gradient"), builds(rank, [config] * 2), strict=True):
        if rank.rank == 1 and fault == "weight":
            run.buffers.buckets[1].weights[0] = math.nan
        elif rank.rank == 1:
            inject(run, fault)
        texts.append(third_step(run)[0])
    return texts


def test_weights_that_are_not_gathered_are_no_fault(tmp_path: Path) -> None:
    """Parameters are NaN after a step with sharded weights; the shards are looked at."""
    layout = {"parallel__dp": 2, "parallel__zero": 3, "train__precision": "fp32", "batch__global": 4}
    for of_weight, of_gradient in run_world(
        2, diverge_with_shards, config_of(settings(LLAMA, tmp_path, **layout), tmp_path)
    ):
        assert " has a weight that is not finite on rank 1 (" in of_weight
        assert "the gradient of layers.2.mlp.down.weight on rank" in of_gradient


def test_a_tied_embedding_does_not_hide_the_source_of_a_gradient(tmp_path: Path) -> None:
    """The embedding is first and last in the network, so every fault reaches its gradient."""
    config = config_of(settings(GPT, tmp_path, train__precision="fp32", batch__global=4, parallel__pp=2), tmp_path)
    for rank in run_world(2, diverge, config, last_rank_with_layer_2(config)):
        assert "the gradient of layers.2.mlp.down.bias on rank 1 (" in rank[FAULTS.index("gradient")][0]


def unguarded(rank: Rank, config: Any) -> list[tuple[str, bool]]:
    """A third step with a non-finite gradient, without the check; then also without the optimizer's skip."""
    import torch

    from megascale.train import step

    run = build_run(rank, config)
    train_two_steps(run)
    step.check_step_finite = lambda *arguments: None
    results, compute_clipping = [], run.optimizer.compute_clipping
    for unplugged in (False, True):
        if unplugged:
            run.optimizer.compute_clipping = lambda *a, **k: replace(compute_clipping(*a, **k), skip=torch.zeros(()))
        inject(run, "gradient")
        text, unchanged = third_step(run)
        results.append((text, unchanged or all(t.isfinite().all() for t in state(run))))
    return results


def test_without_the_guards_the_weights_become_non_finite(tmp_path: Path) -> None:
    config = config_of(settings(LLAMA, tmp_path, train__precision="fp32", batch__global=4), tmp_path)
    assert run_world(1, unguarded, config) == [[("", True), ("", False)]]


def isolated(rank: Rank, configs: list[Any]) -> list[list[str]]:
    """Errors of steps in which one element of a weight's gradient is not finite on rank 1: for every configuration with
    three transports, and for two weights, which lie in the shards of the two ranks.
    """
    from tests.runs import send_messages

    texts_of_runs: list[list[str]] = []
    for number, run in enumerate(builds(rank, [config for config in configs for _ in range(3)])):
        dp, transport = run.mesh.dp, number % 3
        if number == 0:
            shared = dp.p2p_transport, dp.transport
        dp.p2p_transport, dp.transport = shared
        if transport:
            send_messages(dp, backend=transport == 2)
        train_two_steps(run)
        texts = []
        for name in ISOLATED:
            (bucket,) = run.buffers.buckets
            (slot,) = [slot for slot in bucket.layout.slots if slot.parameter.name == name]
            assert (slot.stop <= bucket.layout.numel // 2) is (name == ISOLATED[0]), (
                "the weights lie in different shards"
            )
            start_reduction = bucket.start_reduction

            def faulty(name: str = name, bucket: Any = bucket, reduce: Any = start_reduction) -> None:
                if rank.rank == 1:
                    bucket.parameters[name].main_grad[0, 0] = math.nan
                reduce()

            bucket.start_reduction = faulty
            texts.append(third_step(run)[0])
            bucket.start_reduction = start_reduction
        texts_of_runs.append(texts)
    return texts_of_runs


ISOLATED = ("layers.0.attention.qkv.weight", "layers.3.mlp.down.weight")


def test_the_gradient_of_one_weight_is_named(tmp_path: Path) -> None:
    """With zero = 2 the source rank is unknown, so both ranks are reported."""
    layouts = [{"parallel__dp": 2, "parallel__zero": zero} for zero in (0, 1, 2)]
    run = {"train__precision": "fp32", "batch__global": 4}
    configs = [config_of(settings(LLAMA, tmp_path, **run, **layout), tmp_path) for layout in layouts]
    ranks = run_world(2, isolated, configs)
    assert ranks[0] == ranks[1]
    for zero, texts_of_zero in zip((0, 1, 2), (ranks[0][n : n + 3] for n in (0, 3, 6)), strict=True):
        for texts in texts_of_zero:
            for name, text in zip(ISOLATED, texts, strict=True):
                where = "on rank 1 (" if zero < 2 else "on rank 0 ("
                assert f"the gradient of {name} {where}" in text and ("and 1 more" in text) == (zero == 2)


def report(rank: int, reduced_from: list[int], grads: dict[str, int], buckets: set[int]) -> NonFiniteReport:
    return NonFiniteReport(rank, "host", reduced_from, 1.0, [], grads, buckets)


def test_every_possible_source_of_a_reduced_gradient_is_counted() -> None:
    """A reduced shard does not show the source: any rank with a non-finite bucket before the reduction counts."""
    shard = {"layers.1.mlp.down.weight": 0, "layers.1.attention.qkv.weight": 0}
    reports = [
        report(0, [0], {}, set()),
        report(1, [0], shard, set()),
        report(2, [0], {}, {0}),
        report(3, [0], {}, {0}),
        report(4, [4], {}, {0}),  # another stage, with another first bucket
    ]
    name = "the gradient of layers.1.mlp.down.weight on rank"
    assert _first_cause(reports, ModelConfig(**GPT)) == f"{name} 2 (host) and 1 more is not finite"
    assert _first_cause(reports[:2], ModelConfig(**GPT)) == f"{name} 1 (host) is not finite"
    assert _first_cause(reports[:1], ModelConfig(**GPT)) == "the sum of all gradients is not finite"
    incomplete = [replace(report, nonfinite_buckets=set(), incomplete=True) for report in reports]
    assert _first_cause(incomplete, ModelConfig(**GPT)) == f"{name} 0 (host) and 3 more is not finite", (
        "the whole stage"
    )


EXPERTS = LLAMA | {"num_layers": 2, "experts": 4, "experts_per_token": 2, "expert_ffn_size": 24}
EXPERT_LAYOUTS: list[dict[str, Any]] = [
    {"parallel__dp": 4, "parallel__ep": 4},
    {"parallel__dp": 4, "parallel__ep": 2, "parallel__zero": 0},
    {"parallel__dp": 2, "parallel__tp": 2, "parallel__sp": True, "parallel__ep": 4, "parallel__zero": 2},
]
DOWN = "layers.1.experts.down.weight"


def errors_of_an_expert(rank: Rank, configs: list[Any]) -> list[str]:
    """The error of a step of each run, in which the gradient of an expert is not finite on rank 2."""
    from megascale.core.errors import DivergenceError
    from megascale.train.step import train_step

    def spoil(bucket: Any, full: Any) -> None:
        (slot,) = [slot for slot in bucket.layout.slots if slot.parameter.name == DOWN]
        full[slot.stop - 1] = math.nan

    texts = []
    for config in configs:
        run = build_run(rank, config)
        if rank.rank == 2:
            (bucket,) = [bucket for bucket in run.buffers.buckets if DOWN in bucket.parameters]
            bucket.grad_reader = spoil  # after the first backward
        with pytest.raises(DivergenceError) as caught:
            train_step(run, run.train_loader.batch(0))
        texts.append(str(caught.value))
    return texts


def test_the_rank_of_an_expert_is_named(tmp_path: Path) -> None:
    """Ranks with other experts have parameters of the same names."""
    configs = [config_of(settings(EXPERTS, tmp_path, batch__global=4, **it), tmp_path) for it in EXPERT_LAYOUTS]
    (texts,) = {tuple(texts) for texts in run_world(4, errors_of_an_expert, configs)}
    for text in texts:
        assert re.search(rf"the gradient of {re.escape(DOWN)} on rank 2 \(\S+\) is not finite", text), text


def last_rank_with_layer_2(config: Any) -> int:
    from megascale.layout.chunks import stages_of
    from megascale.layout.topology import topology_of

    stages, topology = stages_of(config.model, config.parallel), topology_of(config.parallel)
    holder = next(stage % topology.pp for stage in range(stages.count) if 2 in stages.layers(stage))
    return max(rank for rank in range(config.world_size) if topology.coord(rank).pp == holder)


@pytest.mark.slow
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


STATE = ("master", "exp_avg", "exp_avg_sq")


def check_with_faults(rank: Rank, config: Any) -> dict[str, str]:
    """Make one element of rank 1's state infinite after a step, and check the state. Returns what is said, by STATE."""
    from megascale.core.errors import DivergenceError
    from megascale.train.finite_check import check_state_finite

    run = build_run(rank, config)
    train_two_steps(run)
    check_state_finite(run)
    texts, shard = {}, run.optimizer.shards[-1]
    for which in STATE:
        element = (shard.master if which == "master" else shard.state[which])[:1]
        kept = element.clone()
        if rank.rank == 1:
            element.fill_(math.inf)
        try:
            check_state_finite(run)
            texts[which] = "saved"
        except DivergenceError as error:
            texts[which] = str(error)
        element.copy_(kept)
    check_state_finite(run)
    return texts


def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    config = config_of(settings(LLAMA, tmp_path, train__precision="bf16", parallel__dp=2), tmp_path)
    first, second = run_world(2, check_with_faults, config)
    assert first == second and first.keys() == set(STATE)
    for which, text in first.items():
        said = r"step 2: \S+ or its optimizer state is not finite on rank 1; nothing was saved"
        assert re.match(said, text), (which, text)


@pytest.mark.slow
def test_a_step_with_non_finite_weights_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
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
    assert "step 4: " in err and "nothing was saved" in err
    saved = sorted(path.name for path in (job.folder / "checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in (1, 2, 3)]
