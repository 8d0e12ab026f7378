"""Ranks that exchange tokens, each with delays of its own, in real processes: no step waits for ever."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.rng import Dropout
from megascale.parallel.segments import finish
from tests.parallel.experts.test_expert_layouts import EXCHANGES, MIXTRAL
from tests.runs import build_run, config_of, settings
from tests.worlds import run_world

STEPS, TOKENS = 1000, 16
WORLDS = 5
"""Worlds that share the steps: one of them has as long as the steps of all would take on a busy host."""

LONGEST = 4e-3  # seconds of a delay, of which every fourth call has one


def steps(rank: Rank, config: RunConfig, world: int) -> tuple[int, int]:
    """Run the layer forward and backward with random choices: the slots that this rank chose, and the rows it had."""
    seed = world * rank.world_size + rank.rank
    run, draw = build_run(rank, config), random.Random(seed)
    layer = run.stages[0].layers["0"].mlp
    group, generator = layer._experts.group, torch.Generator().manual_seed(seed)

    def delay(*_: Any) -> None:
        if draw.random() < 0.25:
            time.sleep(draw.random() * LONGEST)

    group.fault_hook = delay
    slots = rows = 0
    for step in range(STEPS // WORLDS):
        torch.normal(0.0, 1.0, (8,), generator=generator, out=layer._experts.bias[0].view(-1))
        x = torch.randn(TOKENS, 1, 32, dtype=torch.float64, generator=generator).requires_grad_()
        batch = MicroBatch(None, None, None, Dropout(0.0, 0, [0], torch.device("cpu")))
        finish(layer.steps(x, x, batch))[1].square().sum().backward()
        assert x.grad is not None and bool(x.grad.isfinite().all()), step
        choice = batch.expert_choices[0]
        slots += int(choice.counts.sum())
        rows += sum(sum(dispatcher.groups.counts) for dispatcher in choice.dispatchers)
    return slots, rows


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["all-to-all", *EXCHANGES])
def test_a_thousand_steps_with_delays_end(exchange: str, tmp_path: Path) -> None:
    keys = {"parallel__dp": 4, "parallel__ep": 4} | EXCHANGES.get(exchange, {})
    model = MIXTRAL | {"num_layers": 1, "balance_bias": True}
    config = config_of(settings(model, tmp_path, **keys), tmp_path)
    for world in range(WORLDS):
        slots, rows = zip(*run_world(4, steps, config, world), strict=True)
        assert set(slots) == {STEPS // WORLDS * TOKENS * 2} and sum(rows) == sum(slots)
        assert len(set(rows)) > 1, "loads are uneven"
