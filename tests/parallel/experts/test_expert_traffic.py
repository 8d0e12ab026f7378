"""Bytes of every exchange of tokens follow from the counts of rows, and with equal counts from the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout.topology import topology_of
from megascale.plan.account.stage_traffic import StageTraffic
from tests.parallel.experts.test_expert_layouts import MIXTRAL, SHARED
from tests.recorded_events import forget_events
from tests.runs import build_run, config_of, settings, traffic_of
from tests.worlds import run_world

Counts = list[list[int]]
"""Rows of a rank by exchange, a layer of a micro-batch, and by expert."""


def recorded(rank: Rank, config: RunConfig) -> tuple[tuple[int, int], Counts]:
    """Return (calls, bytes) of a step's exchanges over ep, and the counts of rows."""
    from megascale.train.step import train_step

    run = build_run(rank, config)
    forget_events(run.mesh.recorder)
    batch = run.train_loader.batch(0)
    train_step(run, batch)
    counts = [
        choice.counts.tolist() for each in batch.micro_batches for _, choice in sorted(each.expert_choices.items())
    ]
    return traffic_of(run, step=1)["ep"]["all_to_all"], counts


def expected(config: RunConfig, ranks: list[Counts], rank: int) -> tuple[int, int]:
    """Count calls and bytes of a rank from the counts of all."""
    m, group = config.model, topology_of(config.parallel).group(rank, "ep")
    (compute, wide), local, calls, nbytes = config.train.element_bytes, m.experts // len(group), 0, 0
    row, own = m.hidden_size * compute, slice(group.index(rank) * local, (group.index(rank) + 1) * local)
    for number, counts in enumerate(ranks[rank]):
        sent = sum(counts) - sum(counts[own])
        arrived = sum(sum(ranks[peer][number][own]) for peer in group if peer != rank)
        passes = 2 if config.train.recompute == "full" else 1
        calls += 1 + 2 * passes + 2
        nbytes += 8 * m.experts + (passes * sent + arrived) * (row + wide) + (passes * arrived + sent) * row
    return calls, nbytes


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        (MIXTRAL, {"parallel__dp": 2, "parallel__ep": 2, "train__precision": "bf16", "train__recompute": "full"}),
        pytest.param(
            SHARED, {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__ep": 4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["full recomputation", "sp"],
)  # fmt: skip
def test_exchanged_bytes_follow_from_counts(model: dict[str, Any], keys: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(settings(model, tmp_path, batch__global=4, **keys), tmp_path)
    traffic, counts = zip(*run_world(config.world_size, recorded, config), strict=True)
    slots = config.row_tokens // config.parallel.tp * config.model.experts_per_token
    assert all(sum(of_layer) == slots for of_rank in counts for of_layer in of_rank)
    for rank in range(config.world_size):
        assert traffic[rank] == expected(config, list(counts), rank)
    formula = [each for each in StageTraffic(config, 0).all() if each.group == "ep"]
    equal = [[slots // config.model.experts] * config.model.experts] * len(counts[0])
    total = sum(each.times for each in formula), sum(each.times * each.bytes for each in formula)
    assert total == expected(config, [equal] * config.world_size, 0)
