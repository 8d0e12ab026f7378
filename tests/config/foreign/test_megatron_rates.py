"""Learning rates of imported arguments are those of megatron-core from the end of the warm-up on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megascale.config.foreign.imported import import_arguments
from megascale.config.train import OptimizerConfig
from megascale.optim.lr import learning_rate

LR, LEAST, STEPS, BATCH = 3e-4, 3e-5, 40, 8
LENGTH: dict[str, Any] = {
    "num_layers": [2], "global_batch_size": [BATCH], "train_iters": [STEPS], "lr": [LR], "min_lr": [LEAST],
}  # fmt: skip
WARMUPS: dict[str, tuple[dict[str, Any], int]] = {
    "none": ({}, 0), "iterations": ({"lr_warmup_iters": [5]}, 5), "a share": ({"lr_warmup_fraction": [0.1]}, 4),
    "samples": ({"lr_warmup_samples": [6 * BATCH]}, 6),
}  # fmt: skip


def theirs(style: str, warmup: int) -> list[float]:
    """The rates of the steps, from the first."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group: dict[str, Any] = {}
    schedule = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]), 0.0, LR, LEAST, warmup * BATCH, STEPS * BATCH, style, 0.1, 0.1, 1,
        "constant", wsd_decay_steps=10 * BATCH, lr_wsd_decay_style="linear",
    )  # fmt: skip
    rates = []
    for _ in range(STEPS):
        rates.append(group["lr"])
        schedule.step(BATCH)
    return rates


@pytest.mark.parametrize("style", ["WSD", "constant", "cosine", "linear"])
@pytest.mark.parametrize("name", sorted(WARMUPS))
def test_rates_are_equal_from_the_end_of_the_warm_up(name: str, style: str) -> None:
    given, warmup = WARMUPS[name]
    wsd = {"lr_wsd_decay_iters": [10], "lr_wsd_decay_style": ["linear"]} if style == "WSD" else {}
    made = import_arguments("Megatron-LM", LENGTH | given | wsd | {"lr_decay_style": [style]})
    settings = made.tree("run")["optimizer"]
    rate, expected = learning_rate(OptimizerConfig(**settings), STEPS), theirs(style, warmup)
    ours = [rate(step) for step in range(1, STEPS + 1)]
    assert ours[warmup:] == pytest.approx(expected[warmup:], rel=1e-9)
    assert all(there < here for here, there in zip(ours[:warmup], expected[:warmup], strict=True))
    assert expected[0] == 0 or not warmup
