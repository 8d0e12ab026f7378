"""The gradient noise scale: norms of first micro-batches in every layout, the estimate on known noise, its state."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.catalog.schedules import SCHEDULES
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError
from megascale.core.rank import Rank
from megascale.record.metrics_writers import JsonLinesWriter
from megascale.schedule.ir import Kind, each_action
from megascale.train.noise_scale import estimate
from tests.marks import only_quick
from tests.runs import GPT, LLAMA, build_run, builds, config_of, settings
from tests.thread_world import run_threads
from tests.worlds import run_world

ALONE = Rank(0, 1, 0, "host")
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": GPT | {"dropout": 0.1},  # a tied embedding, biases and layer norms
    "llama": LLAMA | {"qk_norm": "head", "ffn_size": 64},
}
Totals = tuple[float, float, float]

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "micro2 zero0": {"batch__micro": 2, "parallel__zero": 0},
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "tp2": {"parallel__tp": 2},
    "pp2": {"parallel__pp": 2},
    "pp2 vpp2 no overlap": {"parallel__pp": 2, "parallel__vpp": 2, "overlap__pp": False, "overlap__dp": False},
    "dp2 zero0": {"parallel__dp": 2, "parallel__zero": 0},
    "dp2 zero1": {"parallel__dp": 2, "parallel__zero": 1},
    "dp2 zero2": {"parallel__dp": 2, "parallel__zero": 2},
    "dp2 zero0, one micro-batch a rank": {"parallel__dp": 2, "parallel__zero": 0, "batch__micro": 4},
    "pp2 vpp2 dp2 zero1": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2},
    "tp2 sp pp2 zero2": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__zero": 2},
    "tp2 sp pp2 vpp2 dp2 zero2": {
        "parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2,
        "parallel__zero": 2,
    },
}  # fmt: skip
QUICK = ("alone", "tp2 sp")


def configure(family: str, folder: Path, **keys: Any) -> RunConfig:
    keys = {"train__noise_scale_every": 1, "optimizer__lr": 1e-3} | keys
    return config_of(settings(FAMILIES[family], folder, **keys), folder)


def first_totals(rank: Rank, configs: list[RunConfig]) -> list[Totals]:
    """Totals of the first micro-batches in the first step of each run."""
    from megascale.train.step import train_step

    found = []
    for run in builds(rank, configs):
        totals = train_step(run, run.train_loader.batch(0)).totals
        found.append((totals["first_sq_norm"], totals["first_tokens"], totals["first_sq_tokens"]))
        run.buffers.finish_param_gather()
        run.pipeline.finish_sends()
    return found


@cache
def sq_norm_alone(family: str, micro: int, index: int, folder: Path) -> float:
    """Squared norm of the gradient, summed over tokens, of micro-batch `index` as the whole batch of a first step."""
    from megascale.train.step import train_step

    keys = {"batch__micro": micro, "batch__global": micro, "train__noise_scale_every": 0}
    run = build_run(ALONE, configure(family, folder, **keys))
    result = train_step(run, run.train_loader.batch(index * micro))
    return (result.grad_norm * result.loss_tokens) ** 2


def check_layout(name: str, folder: Path, *families: str) -> None:
    configs = [configure(family, folder, **LAYOUTS[name]) for family in families]
    micro, dp = configs[0].batch.micro, configs[0].dp
    tokens = micro * 16
    for found in run_world(configs[0].world_size, first_totals, configs):
        for family, totals in zip(families, found, strict=True):
            expected = sum(sq_norm_alone(family, micro, index, folder) for index in range(dp))
            assert totals == pytest.approx((expected, dp * tokens, dp * tokens**2), rel=1e-10), family


@pytest.mark.parametrize("name", QUICK)
def test_the_first_micro_batch_of_every_replica_is_measured(name: str, tmp_path: Path) -> None:
    check_layout(name, tmp_path, "gpt")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_measures_the_same(name: str, tmp_path: Path) -> None:
    check_layout(name, tmp_path, *FAMILIES)


SHARED: dict[str, dict[str, Any]] = {
    "cp2 tp2 sp": {"parallel__cp": 2, "parallel__tp": 2, "parallel__sp": True},
    "cp2 pp2, by document": {"parallel__cp": 2, "parallel__pp": 2, "parallel__cp_sharding": "document"},
    "cp4 usp zero2": {"parallel__cp": 4, "parallel__cp_mode": "usp", "parallel__cp_a2a_size": 2, "parallel__zero": 2},
}


def first_totals_of(run: Any) -> Totals:
    from megascale.train.step import train_step

    totals = train_step(run, run.train_loader.batch(0)).totals
    run.buffers.finish_param_gather()
    return totals["first_sq_norm"], totals["first_tokens"], totals["first_sq_tokens"]


@pytest.mark.parametrize("name", only_quick(SHARED, "cp2 pp2, by document"))
@pytest.mark.parametrize("family", only_quick(FAMILIES, "gpt"))
def test_ranks_that_share_sequences_measure_as_one_process(family: str, name: str, tmp_path: Path) -> None:
    """Also where labels do not count, and ranks have different numbers of those that do."""
    keys = {"model__dropout": 0.0, "data__attention_mask": "document", "data__document_length": 5}
    (alone,) = run_threads(configure(family, tmp_path, **keys), first_totals_of)
    for found in run_threads(configure(family, tmp_path, **keys, **SHARED[name]), first_totals_of):
        assert found == pytest.approx(alone, rel=1e-10)


EXPERTS = LLAMA | {"num_layers": 2, "experts": 4, "experts_per_token": 2, "expert_ffn_size": 24}


@pytest.mark.parametrize("name", ["tp2 sp", "cp2 tp2 sp"])
def test_gradients_of_experts_are_summed_over_the_ranks_of_a_sequence(name: str, tmp_path: Path) -> None:
    layout = {"parallel__sp": True, "parallel__tp": 2, "parallel__cp": 2 if name.startswith("cp2") else 1}
    keys = {"train__noise_scale_every": 1, "batch__global": 2}
    alone, shared = (config_of(settings(EXPERTS, tmp_path, **keys, **more), tmp_path) for more in ({}, layout))
    (expected,) = run_threads(alone, first_totals_of)
    for found in run_threads(shared, first_totals_of):
        assert found == pytest.approx(expected, rel=1e-10)


def test_experts_with_tokens_of_other_ranks_are_not_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an expert's first gradient is of tokens of several ranks"):
        config_of(settings(EXPERTS, tmp_path, train__noise_scale_every=1, parallel__dp=2, parallel__ep=2), tmp_path)


def test_nothing_is_measured_in_other_steps(tmp_path: Path) -> None:
    """Without the option, and between measurements, no total is added and no bucket has a reader."""
    from megascale.train.step import train_step

    run = build_run(ALONE, configure("gpt", tmp_path, train__noise_scale_every=2))
    assert run.noise_scale.value is None
    assert "first_sq_norm" not in train_step(run, run.train_loader.batch(0)).totals
    assert all(bucket.grad_reader is None for bucket in run.buffers.buckets)
    assert "first_sq_norm" in train_step(run, run.train_loader.batch(8)).totals
    assert build_run(ALONE, configure("gpt", tmp_path, train__noise_scale_every=0)).noise_scale is None


def test_tokens_that_count_are_those_of_the_first_micro_batch(tmp_path: Path) -> None:
    """With a document mask the first token of a document does not count in the loss."""
    keys = {
        "data__attention_mask": "document",
        "data__document_length": 5,
        "train__precision": "fp32",
        "batch__global": 4,
    }
    run = build_run(ALONE, configure("gpt", tmp_path, **keys))
    batch = run.train_loader.batch(0)
    masks = [micro_batch.mask for micro_batch in batch.micro_batches]
    assert batch.micro_batches[0].loss_tokens == int(masks[0].sum()) < 16
    assert batch.loss_tokens == sum(int(mask.sum()) for mask in masks)


def test_known_noise_is_found() -> None:
    """Gradients of a quadratic: a known mean, plus noise of a known covariance in every token."""
    generator = np.random.default_rng(5)
    gradient, scales = generator.normal(size=40), generator.uniform(0.5, 2, size=40)
    trace, sq_gradient = float((scales**2).sum()), float((gradient**2).sum())
    small, large, found = 4, 64, []
    for _ in range(3000):
        tokens = gradient + scales * generator.normal(size=(large, 40))
        norms = [float((tokens[:count].mean(0) ** 2).sum()) for count in (small, large)]
        found.append(estimate((norms[0], 1 / small), (norms[1], 1 / large)))
    mean = np.mean(found, 0)
    assert mean == pytest.approx((trace, sq_gradient), rel=0.03)
    assert mean[0] / mean[1] == pytest.approx(trace / sq_gradient, rel=0.05)


def test_the_averages_follow_the_estimates(tmp_path: Path) -> None:
    run = build_run(ALONE, configure("gpt", tmp_path, train__noise_scale_decay=0.75))
    scale, averages = run.noise_scale, np.zeros(2)
    scale.begin_step(1)
    for small, large in ((5.0, 2.0), (7.0, 3.0), (9.0, 1.0)):
        totals = {"first_sq_norm": small * 16**2, "first_tokens": 16, "first_sq_tokens": 16**2, "tokens": 128}
        scale.end_step(totals, large**0.5)
        averages = 0.75 * averages + 0.25 * np.array(estimate((small, 1 / 16), (large, 1 / 128)))
        assert scale.value == pytest.approx(averages[0] / averages[1])
    scale.end_step(totals | {"tokens": 16}, 1.0)
    assert scale.value == pytest.approx(averages[0] / averages[1]), "the first micro-batch was the whole batch"
    for _ in range(9):
        scale.end_step(totals, 1e-3)
    assert scale.value is None, "noise hides the gradient"


def test_a_ramp_up_is_measured_with_the_batch_of_each_step(tmp_path: Path) -> None:
    """The first steps have one micro-batch, which tells nothing."""
    from megascale.train.step import train_step

    run = build_run(ALONE, configure("gpt", tmp_path, batch__rampup=[1, 1, 12]))
    known = []
    for _ in range(6):
        train_step(run, run.train_loader.batch(run.progress.samples))
        known.append(float(run.noise_scale.flat_tensors()[0].abs().sum()))
    assert known[0] == 0 and known[-1] > 0


@pytest.mark.parametrize("name", [name for name, card in SCHEDULES.cards.items() if not card.facts["split"]])
def test_schedules_keep_the_first_micro_batch_apart(name: str) -> None:
    """With few micro-batches in flight, the first backward of every chunk is that of micro-batch 0, and the last stage
    begins no second forward before it.
    """
    card = SCHEDULES[name]
    for p in (1, 2, 3, 4):
        for v in (1, 2, 3) if card.facts["v"] is None and p > 1 else (1,):
            for m in range(1, 12):
                apart = True
                for rank in range(p):
                    actions = [*each_action(card.load()(p, v, m, rank))]
                    for chunk in range(v):
                        first = next(i for i, a in enumerate(actions) if a.kind is Kind.B and a.chunk == chunk)
                        assert actions[first].microbatch == 0
                        if (rank, chunk) == (p - 1, v - 1):
                            before = [a for a in actions[:first] if a.kind is Kind.F and a.chunk == chunk]
                            apart = len(before) == 1
                assert m == 1 or p == 1 or apart != any(map(card.facts.get, ("unbounded_in_flight", "pairs")))


def set_averages(run: Any) -> None:
    """Give a run averages that a few measurements on random tokens, which are all noise, do not change much."""
    run.noise_scale.store("noise_scale", [4000.0, 2.0])
    run.noise_scale.end_restore()


def test_the_averages_survive_a_resume(tmp_path: Path) -> None:
    """A checkpoint without averages begins anew."""
    keys = {"checkpoint__every": 1, "checkpoint__async": False}
    run = build_run(ALONE, configure("gpt", tmp_path, **keys))
    set_averages(run)
    run.progress.step = 1
    run.checkpoints.save(run.progress)
    resumed = build_run(ALONE, configure("gpt", tmp_path, **keys))
    resumed.checkpoints.resume()
    assert resumed.noise_scale.value == run.noise_scale.value == 2000

    run = build_run(ALONE, configure("gpt", tmp_path / "off", **keys, train__noise_scale_every=0))
    run.progress.step = 1
    run.checkpoints.save(run.progress)
    resumed = build_run(ALONE, configure("gpt", tmp_path / "off", **keys))
    set_averages(resumed)
    resumed.checkpoints.resume()
    assert resumed.noise_scale.value is None


def test_metrics_have_the_noise_scale(tmp_path: Path) -> None:
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter

    for every in (2, 0):
        keys = {"train__noise_scale_every": every, "train__noise_scale_decay": 0.99, "train__steps": 2}
        run = build_run(ALONE, configure("gpt", tmp_path, **keys, optimizer__warmup_steps=1))
        if every:
            set_averages(run)
        writer = JsonLinesWriter(tmp_path / f"{every}.jsonl", 0)
        train(run, Reporter(run.config, run.device, None, [writer], run.mesh.recorder))
        records = [json.loads(line) for line in (tmp_path / f"{every}.jsonl").read_text().splitlines()]
        if every:
            assert records[0]["noise_scale"] == 2000 != records[1]["noise_scale"] == run.noise_scale.value
        else:
            assert all("noise_scale" not in record for record in records)
