"""The sharpness of logits: its known values, the same one in every layout, and an alert when it rises."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megascale.config.backends import BackendsConfig
from megascale.device import detect_device
from megascale.ops.cross_entropy import CrossEntropy, Targets, no_reduce
from megascale.ops.select import OpContext, build_op
from tests.marks import only_quick
from tests.runs import GEMMA2, GPT, LLAMA, config_of, settings
from tests.thread_world import run_threads

RADIUS = 5e-4


def corners(logits: Tensor, radius: float, loss: Callable[[Tensor], Tensor]) -> float:
    """The largest loss over all corners of the box around logits [n]: of a convex function its maximum."""
    reach = radius * (logits.abs() + 1)
    return max(
        float(loss(logits + reach * torch.tensor(signs))) for signs in itertools.product((-1, 1), repeat=len(logits))
    )


def test_the_oracle_finds_the_worst_point_of_a_quadratic() -> None:
    """Of |z|^2 / 2 it is z + sign(z) reach."""
    z = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
    known = sum((abs(v) + 0.1 * (abs(v) + 1)) ** 2 / 2 for v in z.tolist())
    assert corners(z, 0.1, lambda z: z.square().sum() / 2) == pytest.approx(known, rel=1e-14)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("radius", [RADIUS, 0.3])
def test_the_worst_point_is_that_of_a_search_over_all_corners(radius: float, cap: float | None) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 9, generator=draw, dtype=torch.float64)
    labels = torch.tensor([0, 8, 3, int(logits[3].argmax()), int(logits[4].argmin())])
    capped = logits if cap is None else cap * torch.tanh(logits / cap)
    expected = [corners(row, radius, lambda z, y=y: cross_entropy(z[None], y[None])) for row, y in zip(capped, labels)]  # noqa: B905
    padded = torch.cat([logits, torch.full((5, 2), 7.0, dtype=torch.float64)], 1)
    weights = torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    operation = CrossEntropy(*kernels(), cap).in_box(radius)
    loss, _ = operation(padded, Targets(labels, weights, 9), no_reduce, False)
    assert float(loss) == pytest.approx(float(torch.tensor(expected, dtype=torch.float64) @ weights), rel=1e-13)


def kernels() -> tuple[Any, Any]:
    from megascale.config.model import ModelConfig

    context = OpContext(ModelConfig(**GPT), BackendsConfig(), torch.float64, detect_device(allow_gpu=False))
    built = build_op("cross_entropy", context)
    return built.statistics, built.gradient


def sharpness_of(model: dict[str, Any], folder: Path, **layout: Any) -> float:
    """Return the sharpness before training, which every rank knows."""
    from megascale.train.logit_sharpness import logit_sharpness

    changes = {"batch__global": 4, "train__eval_every": 2, "train__logit_sharpness_every": 2} | layout
    found = run_threads(config_of(settings(model, folder, **changes), folder), logit_sharpness)
    assert len(set(found)) == 1
    return found[0]


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "micro2": (LLAMA, {"batch__micro": 2}),
    "tp2 sp": (LLAMA, {"parallel__tp": 2, "parallel__sp": True}),
    "pp2 vpp2 dp2 zero3": (LLAMA, {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 3}),
    "cp2": (LLAMA, {"parallel__cp": 2}),
    "vocab_pp": (GEMMA2, {"parallel__pp": 2, "parallel__tp": 2, "parallel__vocab_pp": 1}),
    "capped tp4": (GEMMA2 | {"num_kv_heads": 4}, {"parallel__tp": 4}),
}


@pytest.mark.parametrize("name", only_quick(LAYOUTS, "tp2 sp", "pp2 vpp2 dp2 zero3", "vocab_pp"))
def test_every_layout_has_the_same_sharpness(name: str, tmp_path: Path) -> None:
    model, layout = LAYOUTS[name]
    alone = sharpness_of(model, tmp_path)
    assert alone > 0 and sharpness_of(model, tmp_path, **layout) == pytest.approx(alone, rel=1e-8)


def of_equal_logits(run: Any) -> float:
    """Return the sharpness of a model whose logits are all zero."""
    from megascale.train.logit_sharpness import logit_sharpness

    run.stages[0].head.weight.data.zero_()
    return logit_sharpness(run)


def test_the_sharpness_of_equal_logits_is_known(tmp_path: Path) -> None:
    """With n logits of zero the worst point adds RADIUS to all but the label's: f = log(1 + (n - 1) e^(2 RADIUS))."""
    config = config_of(settings(LLAMA, tmp_path, train__eval_every=1, train__logit_sharpness_every=1), tmp_path)
    n = LLAMA["vocab_size"]
    known = 100 * (math.log1p((n - 1) * math.exp(2 * RADIUS)) - math.log(n)) / (1 + math.log(n))
    assert run_threads(config, of_equal_logits) == [pytest.approx(known, rel=1e-9)]


def diverging(run: Any) -> None:
    """Train with a head that grows by half in every step after the sixth, as the logits of a diverging run do."""
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter, open_writers
    from megascale.train.run import Hook

    class Grow(Hook):
        def step_ends(self, run: Any, result: Any) -> None:
            run.stages[0].head.weight.data.mul_(1.5 if run.progress.step > 6 else 1.0)

    run.hooks, config = Grow(), run.config
    config.folder.mkdir(parents=True)
    writers = open_writers(config.folder, config.train.steps, 0, tensorboard=False)
    reporter = Reporter(config, run.device, None, writers, run.mesh.recorder)
    train(run, reporter)
    reporter.close()


def test_a_rise_is_an_alert_before_the_loss_spikes(tmp_path: Path) -> None:
    changes = {"train__steps": 14, "train__eval_every": 20, "train__logit_sharpness_every": 1, "optimizer__lr": 1e-9}
    config = config_of(settings(LLAMA, tmp_path, **changes), tmp_path)
    run_threads(config, diverging)
    records = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    measured = {record["step"]: record["logit_sharpness"] for record in records if "logit_sharpness" in record}
    assert sorted(measured) == list(range(1, 15)) and measured[14] > 2 * measured[1]
    (alert,) = [record for record in records if "alert" in record]
    assert alert["alert"] == "logit_sharpness" and alert["value"] == measured[alert["step"]]
